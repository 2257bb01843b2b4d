"""``fla.ops.rwkv6``: a token reads the state that does not hold it yet, and itself with a bonus::

    o_t = scale · r_tᵀ (S_{t-1} + diag(u) k_t v_tᵀ)
    S_t = diag(exp w_t) S_{t-1} + k_t v_tᵀ

r, k and the log-decay w ``[B, T, H, K]``, v ``[B, T, H, V]``, u ``[H, K]``; states ``[N, H, K, V]``, of as many
sequences as cu_seqlens packs. The forms are one computation.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from fulmen.integrations.fla.recurrence import Results, attend, check_gate, checked, in_reverse
from fulmen.runtime.tensors import at_least_float32, factor


def chunk_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> Results:
    """``cu_seqlens_cpu`` and ``chunk_size`` change nothing."""
    return fused_recurrent_rwkv6(r, k, v, w, u, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Results:
    """``reverse``: from the last token of each sequence to its first."""
    r, k, v = checked(r=r, k=k, v=v)
    check_gate("r", r, "[B, T, H, K]", k.shape)
    check_gate("w", w, "[B, T, H, K]", (*v.shape[:3], *k.shape[3:]))
    check_gate("u", u, "[H, K]", k.shape[2:])
    scale = factor(scale, r)
    read = partial(in_reverse, _read_before) if reverse else _read_before
    output, state = read(
        r,
        k,
        v,
        w,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
    dtype, (r, k, v) = r.dtype, map(at_least_float32, (r, k, v))
    weight = scale * (r * k * u).sum(-1, keepdim=True)
    return (output + weight * v).to(dtype), state


def _read_before(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> Results:
    """``scale · r_tᵀ S_{t-1}``, in float32: the token before reads it, with the query of this one. Before a first token
    is the initial state."""
    output, state = attend(
        r.roll(-1, 1),
        k,
        v,
        w,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
    tokens, output = r.shape[1], at_least_float32(output)
    if tokens == 0:
        return output, state
    output = output.roll(1, 1)
    starts = torch.zeros(1, dtype=torch.int64, device=r.device) if cu_seqlens is None else cu_seqlens[:-1]
    # A sequence after the last token is empty; as any that is, it starts where another does, or nowhere.
    starting = torch.zeros(tokens + 1, dtype=torch.bool, device=r.device).index_fill(0, starts.long(), True)[:-1]
    output = output.masked_fill(starting[:, None, None], 0)
    if initial_state is None:
        return output, state
    r, initial_state = r.to(output.dtype), initial_state.to(output.dtype)
    if cu_seqlens is None:
        first = scale * (r[:, 0, :, :, None] * initial_state).sum(-2)
        return output + pad(first.unsqueeze(1), (0, 0, 0, 0, 0, tokens - 1)), state
    places = starts.clamp(max=tokens - 1)
    first = scale * (r[0, places, :, :, None] * initial_state).sum(-2)
    first = first.masked_fill((cu_seqlens.diff() == 0)[:, None, None], 0)
    return output.index_add(1, places, first.unsqueeze(0)), state
