"""What decays do to the tokens of a chunk and to pairs of them, for a gate that all channels share or one of each.

With w_ij = exp(Σ_{j<t≤i} a_t), one number or one for each channel, a gate weighs what a token reads of the state that
enters (w_{i,0}), what it adds to the one that leaves (w_{C,j}), and pairs j ≤ i. No exponent is above 0.

Tensors are ``[..., C, size]``, matrices of pairs ``[..., C, C]``; the rows of a matrix are the later tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.ops.chunks.weights import Decay, first, pair_weights, second, sum_before, sum_from, weigh


class Gate:
    """The decays of a chunk's tokens, merged to the whole chunk."""

    def __init__(self, decay: Decay, tokens: int) -> None:
        decay.merge(tokens)
        self._decay = decay

    def later(self, x: Tensor) -> Tensor:
        """Weighs what reads the state that enters."""
        return self._decay.weigh_entering(x.clone())

    def earlier(self, x: Tensor) -> Tensor:
        """Weighs what goes into the state that leaves."""
        return self._decay.weigh_leaving(x.clone())

    def decayed(self, state: Tensor, chunk: int) -> Tensor:
        """``[B, H, D, E]`` after all tokens of a chunk."""
        total = self._decay.total(chunk)
        return state if total is None else state * total[..., :, None]


class ScalarGate(Gate):
    """One decay for all channels, or none: one matrix of weights."""

    def __init__(self, decay: Decay, tokens: int) -> None:
        self._weights = pair_weights(decay)
        super().__init__(decay, tokens)

    def pairs(self, x: Tensor, y: Tensor) -> Tensor:
        """Σ_d x_id y_jd w_ij,d for j ≤ i, else 0."""
        return weigh(x @ y.mT, self._weights).tril()

    def to_later(self, matrix: Tensor, y: Tensor) -> Tensor:
        """Σ_{j≤i} matrix_ij w_ij y_j."""
        return weigh(matrix, self._weights) @ y

    def to_earlier(self, matrix: Tensor, x: Tensor) -> Tensor:
        """Σ_{i≥j} matrix_ij w_ij x_i."""
        return weigh(matrix, self._weights).mT @ x

    def inside(self, matrix: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Σ_{j<t≤i} matrix_ij w_ij x_i y_j for each token t, summed over channels."""
        crossing = (matrix * self.pairs(x, y)).tril(-1)
        return sum_from(crossing).tril(-1).sum(-1, keepdim=True)


class ChannelGate(Gate):
    """A decay of each channel: pairs meet at the boundary between two blocks, at one of log2(C) merges."""

    def __init__(self, decay: Decay, tokens: int) -> None:
        self._meetings: list[tuple[int, Tensor | None, Tensor | None]] = []
        while decay.size < tokens:
            self._meetings.append((decay.size, decay.weights_second(), decay.weights_first()))
            decay.double()
        super().__init__(decay, tokens)

    def pairs(self, x: Tensor, y: Tensor) -> Tensor:
        found = torch.diag_embed((x * y).sum(-1))
        for size, of_second, of_first in self._meetings:
            scores = weigh(second(x, size), of_second) @ weigh(first(y, size), of_first).mT
            _second_to_first(found, size).copy_(scores.movedim(-3, -1))
        return found

    def to_later(self, matrix: Tensor, y: Tensor) -> Tensor:
        found = matrix.diagonal(dim1=-2, dim2=-1)[..., None] * y
        for size, of_second, of_first in self._meetings:
            block = _second_to_first(matrix, size).movedim(-1, -3)
            second(found, size).add_(weigh(block @ weigh(first(y, size), of_first), of_second))
        return found

    def to_earlier(self, matrix: Tensor, x: Tensor) -> Tensor:
        found = matrix.diagonal(dim1=-2, dim2=-1)[..., None] * x
        for size, of_second, of_first in self._meetings:
            block = _second_to_first(matrix, size).movedim(-1, -3)
            first(found, size).add_(weigh(block.mT @ weigh(second(x, size), of_second), of_first))
        return found

    def inside(self, matrix: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """For each channel."""
        found = torch.zeros_like(x)
        for size, of_second, of_first in self._meetings:
            block = _second_to_first(matrix, size).movedim(-1, -3)
            later, earlier = weigh(second(x, size), of_second), weigh(first(y, size), of_first)
            second(found, size).add_(sum_from(later * (block @ earlier)))
            first(found, size).add_(sum_before(earlier * (block.mT @ later)))
        return found


def _second_to_first(matrix: Tensor, size: int) -> Tensor:
    """Of each pair of neighbouring blocks, where the second's tokens meet the first's: a view ``[..., size, size,
    pairs]`` of ``[..., C, C]``."""
    blocks = matrix.unflatten(-1, (-1, 2, size)).unflatten(-4, (-1, 2, size))
    return blocks[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2)
