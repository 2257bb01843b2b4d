"""Every check of what a caller hands in, before any work is done.

A message names the argument, what it was and what it must be. Only attributes of tensors are looked at, never values:
that would break torch.compile and synchronise a GPU.
"""

from __future__ import annotations

from torch import Tensor

from fulmen.ops.chunks.decay_form import KEY_FORMS, VALUE_FORMS, DecayForm
from fulmen.ops.chunks.sequences import check_cu_seqlens, shared_heads
from fulmen.ops.chunks.validation import (
    SCHEDULES,
    check_decay,
    check_key_size,
    check_state,
    check_updatable,
    refuse_gradients,
)
from fulmen.runtime.checks import check_choice, check_count, check_flag, check_inputs, check_scale, once_per_signature


@once_per_signature
def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    log_decay_v: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    return_state: bool,
    cu_seqlens: Tensor | None,
    schedule: str,
) -> None:
    check_inputs("[B, N, H, D]", q=q, k=k, v=v)
    check_key_size(q, k)
    heads = shared_heads(q=q.shape[2], k=k.shape[2], v=v.shape[2])
    check_decay("log_decay", log_decay, k, heads, KEY_FORMS)
    check_decay("log_decay_v", log_decay_v, v, heads, VALUE_FORMS, "E")
    check_scale(scale)
    check_flag("return_state", return_state)
    check_choice("schedule", schedule, SCHEDULES)
    letters, states = "[B, H, D, E]", q.shape[0]
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q)
        letters, states = "[sequences, H, D, E]", cu_seqlens.shape[0] - 1
    if initial_state is not None:
        check_state("initial_state", initial_state, letters, (states, heads, q.shape[3], v.shape[3]), q)


@once_per_signature
def check_states(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    log_decay_v: Tensor | None,
    initial_state: Tensor | None,
    chunk_size: int,
    schedule: str,
) -> None:
    check_inputs("[B, N, H, D]", k=k, v=v)
    counts = {"k": k.shape[2], "v": v.shape[2]}
    for name, x in (("log_decay", log_decay), ("log_decay_v", log_decay_v)):
        if isinstance(x, Tensor) and x.ndim in (1, 3, 4):
            counts[name] = DecayForm.of(x).heads(x)
    heads = shared_heads(**counts)
    check_decay("log_decay", log_decay, k, heads, KEY_FORMS)
    check_decay("log_decay_v", log_decay_v, v, heads, VALUE_FORMS, "E")
    check_count("chunk_size", chunk_size)
    check_choice("schedule", schedule, SCHEDULES)
    if initial_state is not None:
        check_state("initial_state", initial_state, "[B, H, D, E]", (k.shape[0], heads, k.shape[3], v.shape[3]), k)


@once_per_signature
def check_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor | None,
    log_decay_v: Tensor | None,
    scale: float | None,
) -> None:
    check_inputs("[B, H, D]", q=q, k=k, v=v)
    check_key_size(q, k)
    heads = shared_heads(q=q.shape[1], k=k.shape[1], v=v.shape[1])
    if state is None:
        raise TypeError("state must be a torch.Tensor [B, H, D, E]; got None")
    check_state("state", state, "[B, H, D, E]", (q.shape[0], heads, q.shape[2], v.shape[2]), q)
    check_updatable(state, q)
    check_decay("log_decay", log_decay, k, heads, KEY_FORMS)
    check_decay("log_decay_v", log_decay_v, v, heads, VALUE_FORMS, "E")
    check_scale(scale)
    inputs = {"q": q, "k": k, "v": v, "state": state, "log_decay": log_decay, "log_decay_v": log_decay_v}
    refuse_gradients("linear_attention_step", "linear_attention", inputs)
