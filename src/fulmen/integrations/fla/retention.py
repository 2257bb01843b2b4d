"""``fla.ops.retention``: linear attention whose head h decays by ``1 - 2^(-5 - h)``.

q and k ``[B, T, H, K]``, v ``[B, T, H, V]``; states ``[N, H, K, V]``, of as many sequences as cu_seqlens packs. The
forms are one computation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.integrations.fla.recurrence import Results, attend, checked, v_first
from fulmen.integrations.fla.simple_gla import parallel_simple_gla


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> Results:
    """``chunk_size`` changes nothing."""
    return fused_recurrent_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Results:
    """As :func:`chunk_retention`."""
    return fused_recurrent_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
        log_decay(q),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        reverse=reverse,
        state_v_first=v_first(state_v_first, transpose_state_layout),
        cu_seqlens=cu_seqlens,
    )


def parallel_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Results:
    """The outputs and, with ``output_attentions``, the weights ``[B, H, T, T]`` that make them of v."""
    q, k, v = checked(q=q, k=k, v=v)
    g = log_decay(q).expand(q.shape[:3])
    return parallel_simple_gla(q, k, v, g, scale, output_attentions, cu_seqlens)


def log_decay(q: Tensor) -> Tensor:
    """``[H]``, for queries ``[B, T, H, K]``."""
    heads = torch.arange(q.shape[2], dtype=torch.float32, device=q.device)
    return torch.log1p(-torch.exp2(-5 - heads))
