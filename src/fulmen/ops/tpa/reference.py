"""The specification: build q, k and v from their factors, then softmax attention."""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.ops.tpa.problem import Decode


def forward(p: Decode, output: Tensor) -> None:
    output.copy_(naive(p.in_state_dtype()))


def naive(p: Decode) -> Tensor:
    """``[B, 1, H, E]``, in the dtype of the factors throughout."""
    q, k, v = product(p.aq, p.bq), product(p.ak, p.bk), product(p.av, p.bv)
    padding = p.padding()
    if padding is not None:
        v = v.masked_fill(padding[:, :, None, None], 0.0)  # a weight of 0 does not hide NaN
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * p.scale
    return torch.einsum("bhnm,bmhe->bnhe", softmax(scores, padding), v)


def product(a: Tensor, b: Tensor) -> Tensor:
    """The mean over ranks of a_r ⊗ b_r: ``[..., H, R]`` and ``[..., R, D]`` to ``[..., H, D]``."""
    rank = a.shape[-1]
    return a * b if rank == 1 else a @ b / rank


def softmax(scores: Tensor, padding: Tensor | None) -> Tensor:
    """Over the last dimension of ``[B, ..., M]``, with exact zeros for the padding ``[B, M]``."""
    if padding is None:
        return torch.softmax(scores, -1)
    while padding.ndim < scores.ndim:
        padding = padding.unsqueeze(1)
    # Where all is padding, the softmax is NaN before it is 0.
    return torch.softmax(scores.masked_fill(padding, -torch.inf), -1).masked_fill(padding, 0.0)
