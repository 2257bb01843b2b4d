"""How tensors reach the kernels: a pointer and its strides, and where a program's tokens are."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fulmen.runtime.tensors import dense

# Segments start at multiples of this many tokens, and the chunk of every kernel divides it.
UNIT = tl.constexpr(128)
LARGEST = (1 << 31) - 1  # distance in 32 bits


class Tokens(NamedTuple):
    """A tensor ``[B, N, heads, K]`` with a dense last dimension (``[B, N, heads]`` for one number per token)."""

    pointer: Any
    batch: int  # strides
    token: int
    head: int
    share: int  # how many heads of the call read one head of this tensor
    size: int  # K


class States(NamedTuple):
    """States ``[sequences, H, boundaries, R, W]``, whichever of R and W is the key axis."""

    pointer: Any
    sequence: int  # strides
    head: int
    boundary: int
    row: int
    column: int


# Of a :class:`Partition`, as kernels take them: Triton shall not compile a kernel again where one is divisible by 16.
PARTITION_NUMBERS = ("length", "segments", "segment_tokens")


class Partition(NamedTuple):
    """How sequences are partitioned: into ``segments`` of ``tokens`` each, or of equal parts of a packed sequence.

    Kernels take its fields one by one and put them together again.
    """

    cu_seqlens: Any  # None where sequences are the batch
    length: int
    segments: int
    tokens: int


def readable(x: Tensor) -> Tensor:
    """An input ``[B, N, heads, K]``, or ``[B, N, heads]``, as the kernels can read it: itself or a copy."""
    x = dense(x) if x.ndim == 4 else x
    return x if tokens_are_near(x) else x.contiguous()


def readable_state(x: Tensor | None) -> Tensor | None:
    return x if x is None or states_are_near(x) else x.contiguous()


def tokens_are_near(x: Tensor) -> bool:
    return is_near(min(x.shape[1], UNIT.value), x.stride(1))


def states_are_near(x: Tensor) -> bool:
    return all(is_near(x.shape[i], x.stride(i)) for i in (-2, -1))


def is_near(count: int, stride: int) -> bool:
    """Whether kernels can count a distance of ``count`` strides: as they do with a stride of 32 bits, in 32 bits."""
    return stride > LARGEST or (count - 1) * stride <= LARGEST


def tokens(x: Tensor, heads: int) -> Tokens:
    if not tokens_are_near(x):
        raise ValueError(f"the Triton kernels cannot reach tokens that are {x.stride(1)} elements apart")
    batch, token, head = x.stride()[:3]
    return Tokens(x, batch, token, head, heads // x.shape[2], x.shape[3] if x.ndim == 4 else 1)


def states(x: Tensor, transposed: bool = False) -> States:
    """``[sequences, H, boundaries, D, E]``, or ``[sequences, H, D, E]`` for all boundaries; ``transposed`` makes E
    the rows."""
    if not states_are_near(x):
        raise ValueError(f"the Triton kernels cannot reach all of a state with strides {list(x.stride()[-2:])}")
    sequence, head, *boundary, row, column = x.stride()
    return States(x, sequence, head, boundary[0] if boundary else 0, *((column, row) if transposed else (row, column)))


@triton.jit
def place(partition, sequence, segment):
    """(batch, the sequence's first token, the segment's first token and end) of a program, as int64."""
    if partition.cu_seqlens is None:
        batch = sequence.to(tl.int64)
        start = batch * 0
        stop = start + partition.length
        tokens = partition.tokens
    else:
        batch = sequence.to(tl.int64) * 0
        start = tl.load(partition.cu_seqlens + sequence).to(tl.int64)
        stop = tl.load(partition.cu_seqlens + sequence + 1).to(tl.int64)
        tokens = tl.cdiv(tl.cdiv(stop - start, partition.segments), UNIT) * UNIT
    first = tl.minimum(start + segment * tokens, stop)
    return batch, start, first, tl.minimum(first + tokens, stop)


@triton.jit
def channels_of_segment(partition, size, heads, K: tl.constexpr):
    """(channels, head, segment, sequence) of a program that has K channels of a segment of a head."""
    program, tiles = tl.program_id(0), tl.cdiv(size, K)
    channels, head = program % tiles * K + tl.arange(0, K), program // tiles % heads
    return (
        channels,
        head,
        program // (tiles * heads) % partition.segments,
        program // (tiles * heads * partition.segments),
    )


@triton.jit
def chunk_index(partition, sequence, start, t, C: tl.constexpr):
    """A number of its own for each chunk of C tokens of all packed sequences, or of one sample."""
    chunk = start // C + (t - start) // C
    return chunk if partition.cu_seqlens is None else chunk + sequence


@triton.jit
def chunk_place(partition, number, chunks, sequences, C: tl.constexpr):
    """(batch, first token, valid tokens) of a chunk by its number, as int64: what :func:`chunk_index` gave it, plus
    ``chunks`` for each sample before. Of packed sequences, numbers without a chunk have no valid tokens."""
    if partition.cu_seqlens is None:
        batch = (number // chunks).to(tl.int64)
        first = (number % chunks).to(tl.int64) * C
        valid = partition.length - first
    else:
        batch = number.to(tl.int64) * 0
        found, beyond = number * 0, number * 0 + sequences
        while beyond - found > 1:  # the last sequence whose first chunk has no higher number
            middle = (found + beyond) // 2
            before = tl.load(partition.cu_seqlens + middle) // C + middle <= number
            found, beyond = tl.where(before, middle, found), tl.where(before, beyond, middle)
        start = tl.load(partition.cu_seqlens + found).to(tl.int64)
        first = start + (number - (start // C + found)) * C
        valid = tl.load(partition.cu_seqlens + found + 1) - first
    return batch, first, valid


@triton.jit
def row_of(x, batch, token, head):
    """Where the row of ``token`` starts."""
    return x.pointer + (batch * x.batch + (head // x.share).to(tl.int64) * x.head) + token * x.token


@triton.jit
def load_rows(x, batch, token, head, rows, valid, columns, WHOLE: tl.constexpr = False):
    """``[C, K]``: ``rows`` after ``token``; zeros outside of the ``valid`` ones and of the tensor.

    ``WHOLE``: the tensor has all the columns.
    """
    rows, columns = rows[:, None], columns[None, :]
    pointers = row_of(x, batch, token, head) + rows * x.token + columns
    mask = rows < valid if WHOLE else (rows < valid) & (columns < x.size)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_column(x, batch, token, head, rows, valid, column):
    """``[C]`` in float32: one number of each of the ``rows`` after ``token``; zeros outside of the ``valid`` ones."""
    pointers = row_of(x, batch, token, head) + rows * x.token + column
    return tl.load(pointers, mask=rows < valid, other=0.0).to(tl.float32)


@triton.jit
def load_row(x, batch, token, head, columns):
    """One token's ``[K]`` in float32; zeros beyond the end."""
    return tl.load(row_of(x, batch, token, head) + columns, mask=columns < x.size, other=0.0).to(tl.float32)


@triton.jit
def store_rows(x, batch, token, head, rows, valid, columns, values, WHOLE: tl.constexpr = False):
    rows, columns = rows[:, None], columns[None, :]
    pointers = row_of(x, batch, token, head) + rows * x.token + columns
    mask = rows < valid if WHOLE else (rows < valid) & (columns < x.size)
    tl.store(pointers, values.to(x.pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_state(x, sequence, head, boundary, rows, columns, row_size, column_size):
    """In float32, whatever it is kept in."""
    pointers, exist = state_at(x, sequence, head, boundary, rows, columns, row_size, column_size)
    return tl.load(pointers, mask=exist, other=0.0).to(tl.float32)


@triton.jit
def store_state(x, sequence, head, boundary, rows, columns, row_size, column_size, values):
    pointers, exist = state_at(x, sequence, head, boundary, rows, columns, row_size, column_size)
    tl.store(pointers, values, mask=exist)


@triton.jit
def state_at(x, sequence, head, boundary, rows, columns, row_size, column_size):
    """Pointers to the elements of one state, and which of them exist."""
    rows = rows[:, None]
    base = (
        x.pointer + sequence.to(tl.int64) * x.sequence + head.to(tl.int64) * x.head + boundary.to(tl.int64) * x.boundary
    )
    return base + rows * x.row + columns[None, :] * x.column, (rows < row_size) & (columns < column_size)[None, :]
