"""The specification: two products and a gate, differentiated by autograd (the published ``Lao Tor``)."""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.runtime.tensors import state_dtype


def attend(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """``gate ⊙ (q·(kᵀv))`` in the inputs' dtype; heads first: q ``[..., N, D]``, v ``[..., M, E]``, gate like o."""
    return gate * (q @ (k.mT @ v))


def output_gated_attention(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """The same for ``[B, N, H, D]``, in float32 (float64 for float64 inputs); autograd keeps what it needs."""
    with torch.autocast(q.device.type, enabled=False):
        return attend(*map(heads_first, (q, k, v, gate))).transpose(1, 2).to(q.dtype)


def heads_first(x: Tensor) -> Tensor:
    """``[B, N, H, D]`` as ``[B, H, N, D]``, in the dtype of all arithmetic."""
    return x.transpose(1, 2).to(state_dtype(x.dtype))
