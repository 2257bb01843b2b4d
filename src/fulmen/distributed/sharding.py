"""Shards of tensors and of ``cu_seqlens``, and the whole of them again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from fulmen.distributed.agreement import Agreement, Call, may_differentiate
from fulmen.distributed.exchange import Gathering, Ranks, summed
from fulmen.distributed.places import Place, packed_places
from fulmen.ops.chunks.sequences import check_cu_seqlens, packed_bounds
from fulmen.runtime.checks import check_count, check_flag


def shard_lengths(tokens: int, world: int) -> list[int]:
    """As equal as they can be, the longer ones first."""
    check_count("tokens", tokens, least=0)
    check_count("world", world)
    return [tokens // world + (rank < tokens % world) for rank in range(world)]


def shard(
    x: Tensor, *, group: dist.ProcessGroup | DeviceMesh, dim: int = 1, lengths: Sequence[int] | None = None
) -> Tensor:
    """This rank's part of a tensor that every rank has: a view, whose gradient is this rank's part.

    Args:
        x: the whole. dim: its axis of tokens.
        group: the ranks, in the order of their shards.
        lengths: of the shards; None: as equal as they can be.
    """
    ranks = Ranks(group)
    _check_dim(x, dim)
    lengths = _checked(lengths, x.shape[dim], ranks)
    return x.narrow(dim, sum(lengths[: ranks.rank]), lengths[ranks.rank])


def gather(x: Tensor, *, group: dist.ProcessGroup | DeviceMesh, dim: int = 1) -> Tensor:
    """The whole of the ranks' shards, which may differ in length, on every rank; its gradient is the sum of all ranks'.

    Args:
        x: this rank's shard. dim: its axis of tokens; the others are the same on all ranks.
        group: the ranks, in the order of their shards.
    """

    def described() -> Call:
        _check_dim(x, dim)
        facts = {
            "the dtype of x": str(x.dtype),
            "the number of dimensions of x": x.ndim,
            "dim": dim % x.ndim,
            "the other sizes of x": [size for i, size in enumerate(x.shape) if i != dim % x.ndim],
            "torch.is_grad_enabled()": torch.is_grad_enabled(),
        }
        return Call(facts, x.shape[dim], may_differentiate(x))

    agreement = Agreement("gather", Ranks(group), x, described)
    if agreement.differentiates and not x.requires_grad:  # the backward's sum is of all ranks
        x = x.detach().requires_grad_()
    return _Gather.apply(x, agreement, dim % x.ndim)


def shard_cu_seqlens(
    cu_seqlens: Tensor, *, group: dist.ProcessGroup | DeviceMesh, lengths: Sequence[int] | None = None
) -> Place:
    """Where this rank's shard lies among packed sequences: ``place.cu_seqlens(like)`` are its own, ``place.enters``
    says whether the first of them began on an earlier rank. ``lengths`` as in :func:`shard`."""
    ranks = Ranks(group)
    bounds = _bounds(cu_seqlens)
    return packed_places(_checked(lengths, bounds[-1], ranks), bounds)[ranks.rank]


def gather_cu_seqlens(cu_seqlens: Tensor, enters: bool, *, group: dist.ProcessGroup | DeviceMesh) -> Tensor:
    """The global ``cu_seqlens`` of the ranks' own ones. Ranks before the first token hold no sequence, as in
    :func:`shard_cu_seqlens`.

    Args:
        cu_seqlens: this rank's.
        enters: whether its first sequence began on an earlier rank.
    """
    ranks = Ranks(group)

    def described() -> Call:
        _bounds(cu_seqlens)
        check_flag("enters", enters)
        return Call({"the dtype of cu_seqlens": str(cu_seqlens.dtype)}, len(cu_seqlens), differentiates=False)

    counts = Agreement("gather_cu_seqlens", ranks, cu_seqlens, described).lengths
    padded = torch.zeros(1 + max(counts), dtype=torch.int64, device=ranks.device_of_facts(cu_seqlens))
    padded[0], padded[1 : 1 + len(cu_seqlens)] = int(enters), cu_seqlens
    rows: list[list[int]] = Gathering(padded, ranks, "cu_seqlens").wait().tolist()
    lengths: list[int] = []
    for rank, ((continues, *bounds), count) in enumerate(zip(rows, counts, strict=True)):
        here = [stop - start for start, stop in pairwise(bounds[:count])]
        if not any([*lengths, *here]) and rank < ranks.world - 1:
            continue
        if continues and not lengths:
            raise ValueError(f"enters must be False on rank {rank}: no sequence begins before it")
        if continues:
            lengths[-1] += here.pop(0)
        lengths += here
    return torch.tensor([0, *accumulate(lengths)], dtype=cu_seqlens.dtype, device=cu_seqlens.device)


def _check_dim(x: Tensor, dim: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor; got {type(x).__name__}")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must be one of the {x.ndim} dimensions of x; got {dim}")


def _bounds(cu_seqlens: Tensor) -> list[int]:
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be a torch.Tensor; got {type(cu_seqlens).__name__}")
    check_cu_seqlens(cu_seqlens, cu_seqlens[None])
    return packed_bounds(cu_seqlens, int(cu_seqlens[-1]))


def _checked(lengths: Sequence[int] | None, tokens: int, ranks: Ranks) -> Sequence[int]:
    if lengths is None:
        return shard_lengths(tokens, ranks.world)
    for length in lengths:
        check_count("each of lengths", length, least=0)
    if len(lengths) != ranks.world or sum(lengths) != tokens:
        raise ValueError(f"lengths must be {ranks.world} numbers that add up to {tokens}; got {list(lengths)}")
    return lengths


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, agreement: Agreement, dim: int) -> Tensor:
        ranks, lengths = agreement.ranks, agreement.lengths
        ctx.ranks, ctx.dim, ctx.lengths = ranks, dim, lengths
        padded = x.new_zeros(*x.shape[:dim], max(lengths), *x.shape[dim + 1 :])
        padded.narrow(dim, 0, x.shape[dim]).copy_(x)
        sent = Gathering(padded, ranks, "shards").wait()
        return torch.cat([part.narrow(dim, 0, length) for part, length in zip(sent, lengths, strict=True)], dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        whole = summed(gradient.contiguous().clone(), ctx.ranks, "the gradients of shards")
        start = sum(ctx.lengths[: ctx.ranks.rank])
        return whole.narrow(ctx.dim, start, ctx.lengths[ctx.ranks.rank]), None, None
