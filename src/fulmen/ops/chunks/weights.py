"""Decay weights, built by doubling: sums of logarithms that only ever add, and no exponent above zero.

For two adjacent blocks and tokens j in the first, i in the second,

    Σ_{j<t≤i} a_t  =  suffix_j (the sum after j, to the end of the first block)
                    + prefix_i (the sum from the start of the second block up to and including i)

so a pair's weight always factors through the boundary between two blocks. Starting from blocks of one token and merging
neighbours, log2(C) rounds reach every pair of a chunk once, and leave the prefix and suffix of the whole chunk, which
weigh what enters and leaves it. No sums are subtracted, so -inf forgets exactly, never becomes NaN, and a strong decay
does not spoil a weak one beside it. Sums, and not products of rounded e^a: near 1 these are known to 6e-8 only,
which a thousand tokens of gentle decay turn into 6e-5.

Tensors are ``[..., C, K]`` with C a power of two, and K = 1 for a decay that all channels share.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Decay:
    """One axis' decay within blocks of ``size`` tokens; :meth:`double` merges neighbours, :meth:`merge` all of them.

    ``logs`` are the tokens' log-decays; without them there is no decay, and weighing changes nothing.
    """

    def __init__(self, logs: Tensor | None) -> None:
        self.size = 1
        self.prefix = logs
        self.suffix = None if logs is None else torch.zeros_like(logs)
        self._entering: Tensor | None = None
        self._leaving: Tensor | None = None

    def double(self) -> None:
        if self.prefix is not None and self.suffix is not None:
            first(self.suffix, self.size).add_(second(self.prefix, self.size)[..., -1:, :])
            second(self.prefix, self.size).add_(first(self.prefix, self.size)[..., -1:, :])
        self.size *= 2

    def merge(self, tokens: int) -> None:
        """Merge to the whole chunk, whose tokens can then be weighed as they enter and leave it."""
        while self.size < tokens:
            self.double()
        if self._entering is None and self.prefix is not None and self.suffix is not None:
            self._entering, self._leaving = self.prefix.exp(), self.suffix.exp()

    def weigh_entering(self, x: Tensor) -> Tensor:
        """Weigh, in place, what reads the state that enters the chunk."""
        return x if self._entering is None else x.mul_(self._entering)

    def weigh_leaving(self, x: Tensor) -> Tensor:
        """Weigh, in place, what goes into the state that leaves the chunk."""
        return x if self._leaving is None else x.mul_(self._leaving)

    def total(self, chunk: int) -> Tensor | None:
        """What is left after all tokens of one chunk of ``[B, H, chunks, C, K]``, ``[B, H, K]``."""
        if self._entering is None:
            return None
        return self._entering[:, :, chunk if self._entering.shape[2] > 1 else 0, -1]

    def weights_first(self) -> Tensor | None:
        """The weights of the first block of each pair, up to the boundary: ``[..., C / (2·size), size, K]``."""
        return None if self.suffix is None else first(self.suffix, self.size).exp()

    def weights_second(self) -> Tensor | None:
        """The weights of the second block of each pair, from the boundary on."""
        return None if self.prefix is None else second(self.prefix, self.size).exp()


def pair_weights(decay: Decay) -> Tensor | None:
    """All weights of a chunk for a decay with K = 1, ``[..., C, C]``: e^{Σ_{j<t≤i} a_t} at (i, j), and 0 where j > i.
    Merges ``decay`` to the whole chunk on the way.
    """
    if decay.prefix is None or decay.suffix is None:
        return None
    tokens = decay.prefix.shape[-2]
    logs = decay.prefix.new_full((*decay.prefix.shape[:-2], tokens, tokens), -torch.inf)
    logs.diagonal(dim1=-2, dim2=-1).zero_()
    while (size := decay.size) < tokens:
        blocks = logs.unflatten(-1, (-1, 2, size)).unflatten(-4, (-1, 2, size))
        second_to_first = blocks[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2)  # [..., size, size, pairs]
        second_to_first.copy_((second(decay.prefix, size) + first(decay.suffix, size).mT).movedim(-3, -1))
        decay.double()
    decay.merge(tokens)
    return logs.exp_()


def weigh(x: Tensor, weights: Tensor | None) -> Tensor:
    return x if weights is None else x * weights


def first(x: Tensor, size: int) -> Tensor:
    """The first block of each pair of neighbours, a view ``[..., C / (2·size), size, K]``."""
    return x.unflatten(-2, (-1, 2, size)).select(-3, 0)


def second(x: Tensor, size: int) -> Tensor:
    return x.unflatten(-2, (-1, 2, size)).select(-3, 1)


def sum_from(x: Tensor) -> Tensor:
    """Σ_{i≥t} x_i over the tokens of a block."""
    return x.new_ones(x.shape[-2], x.shape[-2]).triu_() @ x


def sum_before(x: Tensor) -> Tensor:
    """Σ_{j<t} x_j over the tokens of a block."""
    return x.new_ones(x.shape[-2], x.shape[-2]).tril_(-1) @ x


def sum_channels(x: Tensor, like: Tensor) -> Tensor:
    """``x`` with as many channels as ``like``: all of them, or their sum."""
    return x if like.shape[-1] == x.shape[-1] else x.sum(-1, keepdim=True)
