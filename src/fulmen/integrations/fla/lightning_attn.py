"""``fla.ops.lightning_attn``: linear attention whose head h of H, in layer l of L, has the log-decay
``-8 h / H · (1 - l / L)``.

q and k ``[B, T, H, K]``, v ``[B, T, H, V]``; states ``[N, H, K, V]``, of as many sequences as cu_seqlens packs. The
forms are one computation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.integrations.fla.recurrence import Results, attend, checked


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> Results:
    """``chunk_size`` changes nothing."""
    return fused_recurrent_lightning_attn(
        q, k, v, layer_idx, num_layers, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens
    )


def fused_recurrent_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Results:
    """``reverse``: from the last token of each sequence to its first."""
    q, k, v = checked(q=q, k=k, v=v)
    heads = torch.arange(q.shape[2], dtype=torch.float32, device=q.device)
    return attend(
        q,
        k,
        v,
        -(8 / q.shape[2] * (1 - layer_idx / num_layers)) * heads,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
    )
