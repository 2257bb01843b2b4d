"""``fla.ops.simple_gla``: linear attention, one decay for each token or head: ``S_t = exp(g_t) S_{t-1} + k_t v_tᵀ``.

q and k ``[B, T, H, K]``, v ``[B, T, H, V]``, log-decay g ``[B, T, H]`` or g_gamma ``[H]``; states ``[N, H, K, V]``, of
as many sequences as cu_seqlens packs. The forms are one computation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.integrations.fla.recurrence import Results, attend, check_gate, checked, v_first
from fulmen.runtime.checks import MAX_SIZE


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> Results:
    """``cu_seqlens_cpu`` and ``chunk_size`` change nothing."""
    q, k, v = checked(q=q, k=k, v=v)
    return attend(
        q,
        k,
        v,
        _log_decay(q, g, g_gamma),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )


def fused_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Results:
    """As :func:`chunk_simple_gla`."""
    return chunk_simple_gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Results:
    """``reverse``: from the last token of each sequence to its first."""
    q, k, v = checked(q=q, k=k, v=v)
    return attend(
        q,
        k,
        v,
        _log_decay(q, g, g_gamma),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        reverse=reverse,
        state_v_first=v_first(state_v_first, transpose_state_layout),
        cu_seqlens=cu_seqlens,
    )


def parallel_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Results:
    """The outputs and, with ``output_attentions``, the weights ``[B, H, T, T]`` that make them of v.
    ``cu_seqlens_cpu`` changes nothing."""
    if output_attentions and cu_seqlens is not None:
        raise ValueError("output_attentions must be False with cu_seqlens")
    output, _ = chunk_simple_gla(q, k, v, g, scale=scale, cu_seqlens=cu_seqlens)
    return output, attentions(q, k, g, scale) if output_attentions else None


def attentions(q: Tensor, k: Tensor, g: Tensor | None, scale: float | None) -> Tensor:
    """``[B, H, T, T]``, token by token: what attention makes of values that are the columns of an identity."""
    batch, tokens = q.shape[:2]
    columns = []
    for begin in range(0, tokens, MAX_SIZE):
        rest = tokens - begin  # tokens before a column have no weight on it
        values = torch.eye(rest, min(rest, MAX_SIZE), dtype=q.dtype, device=q.device).unsqueeze(1)
        weights, _ = chunk_simple_gla(
            q[:, begin:],
            k[:, begin:],
            values.expand(batch, -1, -1, -1),
            None if g is None else g[:, begin:],
            scale=scale,
        )
        columns.append(torch.nn.functional.pad(weights, (0, 0, 0, 0, begin, 0)))
    return torch.cat(columns, -1).transpose(1, 2)


def _log_decay(q: Tensor, g: Tensor | None, g_gamma: Tensor | None) -> Tensor | None:
    if g is not None and g_gamma is not None:
        raise ValueError("g and g_gamma must not both be given: either is the decay")
    if g is not None:
        check_gate("g", g, "[B, T, H]", q.shape[:3])
    if g_gamma is not None:
        check_gate("g_gamma", g_gamma, "[H]", q.shape[2:3])
    return g if g_gamma is None else g_gamma
