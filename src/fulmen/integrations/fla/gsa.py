"""``fla.ops.gsa``: gated slot attention, two linear attentions with a softmax over the M slots between them.

q ``[B, T, HQ, K]``, k ``[B, T, H, K]``, v ``[B, T, H, V]``, slots s and their log-decay g ``[B, T, H, M]``; H divides
HQ. A state is a pair ``[N, H, K, M]`` and ``[N, H, M, V]``, of as many sequences as cu_seqlens packs. Computed in
float32 from the first read to the last. The forms are one computation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulmen.integrations.fla.recurrence import attend, check_gate, checked
from fulmen.ops.chunks.sequences import share_heads
from fulmen.runtime.tensors import at_least_float32, factor

States = tuple[Tensor | None, Tensor | None]


def chunk_gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    checkpoint_level: int = 2,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> tuple[Tensor, States]:
    """``checkpoint_level``, ``cu_seqlens_cpu`` and ``chunk_size`` change nothing."""
    return fused_recurrent_gsa(q, k, v, s, g, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, States]:
    """``reverse``: from the last token of each sequence to its first. Without g, slots are normalized by their running
    sum, as ABC does; that reads the values of cu_seqlens, for which torch.compile breaks the graph."""
    q, k, v = checked(q=q, k=k, v=v)
    (s,) = checked(s=s)
    check_gate("s", s, "[B, T, H, M]", (*k.shape[:3], s.shape[3]))
    dtype, heads, shared = q.dtype, q.shape[2], k.shape[2]
    if heads % shared:
        raise ValueError(f"q must have a multiple of the heads of k, {shared}; got {heads}")
    q, k, v = map(at_least_float32, (q, k, v))
    s = s.to(q.dtype)
    if g is None:
        s, g = additive_gate(s, cu_seqlens)
    check_gate("g", g, "[B, T, H, M]", s.shape)
    g = share_heads(g, heads)
    if not (initial_state is None or (isinstance(initial_state, (tuple, list)) and len(initial_state) == 2)):
        got = type(initial_state).__name__
        raise TypeError(f"initial_state must be a pair of tensors [N, H, K, M] and [N, H, M, V]; got {got}")
    initial_k, initial_v = (None, None) if initial_state is None else initial_state
    # The state is the same for all heads that read one key.
    enter_k, enter_v = (None if x is None else x.repeat_interleave(heads // shared, 1) for x in (initial_k, initial_v))
    options: dict[str, Any] = {"output_final_state": output_final_state, "reverse": reverse, "cu_seqlens": cu_seqlens}
    scores, state_k = attend(q, k, s, log_decay_v=g, scale=factor(scale, q), initial_state=enter_k, **options)
    output, state_v = attend(scores.softmax(-1), s, v, g, scale=1.0, initial_state=enter_v, **options)
    leave_k, leave_v = (None if x is None else x[:, :: heads // shared].contiguous() for x in (state_k, state_v))
    return output.to(dtype), (leave_k, leave_v)


def additive_gate(s: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Slots ``exp(s_t - z_t)`` and log-decays ``z_{t-1} - z_t``, 0 for a first token, with
    ``z_t = log Σ_{i ≤ t} exp(s_i)`` over the tokens of a sequence."""
    lengths = [s.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    sums = [part.logcumsumexp(1) for part in s.split(lengths, 1)]
    before = [torch.cat((z[:, :1], z[:, :-1]), 1) for z in sums]
    z = torch.cat(sums, 1)
    return torch.exp(s - z), torch.cat(before, 1) - z
