"""Packed sequences and shared heads, for the operators that walk tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fulmen.runtime.checks import check_tensor
from fulmen.runtime.tensors import state_dtype


def check_cu_seqlens(cu_seqlens: Tensor, like: Tensor, whose: str = "q, k and v") -> None:
    """All but its values, which :func:`packed_bounds` checks where a backend needs them anyway. ``like`` is an input,
    and ``whose`` it is, for the message."""
    check_tensor("cu_seqlens", cu_seqlens, like, whose)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64; got {cu_seqlens.dtype}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens must have one dimension and at least 2 entries, [sequences + 1]; got shape "
            f"{list(cu_seqlens.shape)}"
        )
    if like.shape[0] != 1:
        got = like.shape[0]
        raise ValueError(f"{whose} must have B = 1 with cu_seqlens (sequences are packed along N); got {got}")


def packed_bounds(cu_seqlens: Tensor, length: int) -> list[int]:
    """The values of ``cu_seqlens``, checked: where each packed sequence starts, and N."""
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0; got {bounds[0]}")
    if bounds[-1] != length:
        raise ValueError(f"cu_seqlens must end at N = {length}; got {bounds[-1]}")
    for i in range(1, len(bounds)):
        if bounds[i] < bounds[i - 1]:
            raise ValueError(f"cu_seqlens must never decrease; got {bounds[i]} after {bounds[i - 1]} at entry {i}")
    return bounds


def packed_sequences(cu_seqlens: Tensor, length: int) -> Iterator[tuple[slice, slice]]:
    """Of each packed sequence, its slice of the tokens and of the states."""
    bounds = packed_bounds(cu_seqlens, length)
    for i in range(len(bounds) - 1):
        yield slice(bounds[i], bounds[i + 1]), slice(i, i + 1)


def shared_heads(**counts: int) -> int:
    """The number of heads H, the largest; the others must divide it."""
    heads = max(counts.values())
    for name, count in counts.items():
        if count < 1 or heads % count:
            listed = ", ".join(f"{other}: {n}" for other, n in counts.items())
            raise ValueError(f"{name} must have a number of heads that divides the largest one; got {count} ({listed})")
    return heads


def share_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat the heads (dimension 2) of ``x`` so that head ``h`` holds what head ``h`` of the call reads."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


def sum_shared_heads(gradient: Tensor, heads: int) -> Tensor:
    """The adjoint of :func:`share_heads`: add up the gradients of the heads that read one shared head."""
    return gradient if gradient.shape[2] == heads else gradient.unflatten(2, (heads, -1)).sum(3)


def new_state(state: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A state ``[B, H, D, E]`` to go on from: a copy of the given one, or zeros, for inputs such as ``like``."""
    if state is not None:
        return state.clone()
    return like.new_zeros(shape, dtype=state_dtype(like.dtype))
