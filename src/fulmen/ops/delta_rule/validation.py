"""Every check of what a caller hands in, before any work is done: attributes of tensors, never their values."""

from __future__ import annotations

from torch import Tensor

from fulmen.ops.chunks.decay_form import KEY_FORMS
from fulmen.ops.chunks.sequences import check_cu_seqlens, shared_heads
from fulmen.ops.chunks.validation import (
    SCHEDULES,
    check_decay,
    check_key_size,
    check_state,
    check_updatable,
    refuse_gradients,
)
from fulmen.runtime.checks import (
    DTYPES,
    check_choice,
    check_flag,
    check_inputs,
    check_scale,
    check_tensor,
    once_per_signature,
)


@once_per_signature
def check_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    normalize_qk: bool,
    scale: float | None,
    initial_state: Tensor | None,
    return_state: bool,
    cu_seqlens: Tensor | None,
    schedule: str,
) -> None:
    check_inputs("[B, N, H, D]", q=q, k=k, v=v)
    check_key_size(q, k)
    heads = shared_heads(q=q.shape[2], k=k.shape[2], v=v.shape[2])
    _check_beta(beta, "[B, N, H]", (*q.shape[:2], heads), q)
    check_decay("log_decay", log_decay, k, heads, KEY_FORMS)
    check_flag("normalize_qk", normalize_qk)
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
def check_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor,
    log_decay: Tensor | None,
    normalize_qk: bool,
    scale: float | None,
) -> None:
    check_inputs("[B, H, D]", q=q, k=k, v=v)
    check_key_size(q, k)
    heads = shared_heads(q=q.shape[1], k=k.shape[1], v=v.shape[1])
    _check_beta(beta, "[B, H]", (q.shape[0], heads), q)
    if state is None:
        raise TypeError("state must be a torch.Tensor [B, H, D, E]; got None")
    check_state("state", state, "[B, H, D, E]", (q.shape[0], heads, q.shape[2], v.shape[2]), q)
    check_updatable(state, q)
    check_decay("log_decay", log_decay, k, heads, KEY_FORMS)
    check_flag("normalize_qk", normalize_qk)
    check_scale(scale)
    inputs = {"q": q, "k": k, "v": v, "beta": beta, "state": state, "log_decay": log_decay}
    refuse_gradients("delta_rule_step", "delta_rule", inputs)


def _check_beta(beta: Tensor, letters: str, shape: tuple[int, ...], like: Tensor) -> None:
    if beta is None:
        raise TypeError(f"beta must be a torch.Tensor {letters}; got None")
    check_tensor("beta", beta, like)
    if beta.dtype not in DTYPES:
        raise TypeError(f"beta must be float32, bfloat16, float16 or float64; got {beta.dtype}")
    if beta.shape != shape:
        raise ValueError(f"beta must have shape {letters} = {list(shape)}; got {list(beta.shape)}")
