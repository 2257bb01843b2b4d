"""Products of factors in torch matmuls, without ever forming k or v."""

from __future__ import annotations

from torch import Tensor

from fulmen.ops.tpa.problem import Decode
from fulmen.ops.tpa.reference import softmax


def forward(p: Decode, output: Tensor) -> None:
    output.copy_(factorised(p.in_state_dtype()))


def factorised(p: Decode) -> Tensor:
    """``[B, 1, H, E]``, in the dtype of the factors throughout; plain torch operations, to be compiled as they are."""
    rank, key_rank, value_rank = p.ranks
    padding, bv = p.padding(), p.bv
    if padding is not None:
        bv = bv.masked_fill(padding[:, :, None, None], 0.0)  # a weight of 0 does not hide NaN
    of_ranks = p.bq[:, 0] @ p.bk.flatten(1, 2).mT  # [B, R, M·Rk]
    of_heads = p.aq[:, 0] @ of_ranks  # [B, H, M·Rk]
    terms = of_heads.unflatten(2, (p.tokens, key_rank)) * p.ak.transpose(1, 2)
    scores = terms[..., 0] if key_rank == 1 else terms.sum(-1)
    weights = softmax(scores * (p.scale / (rank * key_rank)), padding)  # [B, H, M]
    values = weights.unsqueeze(3) * p.av.transpose(1, 2)  # [B, H, M, Rv]
    if padding is not None:
        values = values.masked_fill(padding[:, None, :, None], 0.0)
    if value_rank > 1:
        values = values / value_rank
    return (values.flatten(2, 3) @ bv.flatten(1, 2)).unsqueeze(1)
