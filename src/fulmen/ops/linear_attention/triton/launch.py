"""Launching the kernels: what the launches of one call have in common, and one method for each kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fulmen.ops.chunks.decay_form import DecayForm, Decays
from fulmen.ops.linear_attention.problem import Attention, States
from fulmen.ops.linear_attention.triton.decay_sums import sum_before, sum_decay_gradient
from fulmen.ops.linear_attention.triton.merged_pairs import add_merged_pairs
from fulmen.ops.linear_attention.triton.prepare import merge_blocks, prepare
from fulmen.ops.linear_attention.triton.recurrent import recur
from fulmen.ops.linear_attention.triton.states import fold, sum_segments
from fulmen.ops.linear_attention.triton.tiles import (
    fold_tile,
    merge_tile,
    prepare_tile,
    recurrent_tile,
    sum_tile,
    walk_tile,
)
from fulmen.ops.linear_attention.triton.walk import walk as walk_kernel
from fulmen.runtime.architectures import Architecture, architecture_of
from fulmen.triton_common import operands
from fulmen.triton_common.operands import UNIT, Partition, Tokens
from fulmen.triton_common.packed import clear_rest
from fulmen.triton_common.tiles import WalkTile, few_channels, padded

# The axis of the states that a walk writes, by what it computes. A summary writes either.
WALKS = {"output": "value", "dq": "key", "dk": "key", "dv": "value"}
OTHER = {"key": "value", "value": "key"}
BACKWARD = ("dk", "dv", "summary_backward")  # in time


class LogDecays(NamedTuple):
    """The log-decays of a call as the kernels take them: a scalar one, and those of each axis' channels."""

    scalar: Tokens | None
    key: Tokens | None
    value: Tokens | None
    beside: Tokens | None  # the scalar one, of every token, where there is one of the values' channels too

    def of_axis(self, axis: str) -> tuple[Tokens | None, Tokens | None]:
        """Of its channels, and a scalar one that is added to them."""
        return (self.key, None) if axis == "key" else (self.value, self.beside)


class Rows(NamedTuple):
    """What walks read of an axis. The later token of a pair has a row of q, or of the output's gradient, and the
    earlier one of k or v: as they are, or what :mod:`.prepare` made of them."""

    later: Tensor | None  # None where there is none
    earlier: Tensor
    scale: float
    scores: Tensor | None = None  # [B, N, H, C]
    totals: Tensor | None = None  # [B, chunks, H, D or E]


class Chunks(NamedTuple):
    """What :mod:`.prepare` found of an axis' chunks, ``[B, chunks, H, D or E]``."""

    totals: Tensor
    left_out: Tensor


@dataclass(frozen=True)
class RowSums:
    """What a walk leaves for the gradient of a decay; see :mod:`fulmen.ops.linear_attention.triton.walk`."""

    factor: Tensor  # of the results in the loss: q or k, do or v
    sums: Tensor | None  # [B, N, H * tiles]; with a decay per channel [B, N, H, D or E]; None where decays are counted
    crossing: Tensor | None  # of each segment, [sequences, segments, H * tiles] or [sequences, segments, H, D or E]
    boundaries: Tensor | None  # the states there, or where decays are counted their gradients; None: zeros

    @property
    def counts_decays(self) -> bool:
        return self.sums is None


class Launcher:
    """
    A walk *writes* the "key" or the "value" axis of the states, and reads the other one: results have the size of the
    one, and sums run over the other.
    """

    def __init__(self, p: Attention | States, partition: Partition, sequences: int, small: bool) -> None:
        self.partition, self.sequences, self.heads = partition, sequences, p.heads
        self.key_size, self.value_size = p.k.shape[3], p.v.shape[3]
        self.dtype = p.k.dtype
        self.architecture: Architecture = architecture_of(p.k.device)
        self.small = small
        self.decays, self.logs = p.decays, log_decays_of(p, self.heads)
        self.per_token = p.decays.key.has_tokens and not p.decays.key.by_channel
        self.starts_empty = int(p.initial_state is None)
        self.chunks: dict[str, Chunks] = {}  # by axis, once they are known

    def sizes(self, writes: str) -> tuple[int, int]:
        """The sizes of the read and the written axis."""
        sizes = self.key_size, self.value_size
        return sizes if writes == "value" else (sizes[1], sizes[0])

    @property
    def heads_fill_the_card(self) -> bool:
        """Whether a program for each tile of each head's state leaves none of the card idle."""
        if torch.are_deterministic_algorithms_enabled():
            return True  # bits then do not depend on the batch
        _, write_size = self.sizes(self.summary_writes)
        tiles = triton.cdiv(write_size, self.walk_tile(self.summary_writes).width)
        return self.sequences * self.heads * tiles >= self.architecture.multiprocessors

    @property
    def by_channel(self) -> bool:
        """Whether the channels of an axis decay each by itself."""
        return self.decays.channel_axes > 0

    @property
    def summary_writes(self) -> str:
        """One that decays by channel, if there is one: then what is read mostly does not."""
        return "key" if self.logs.value is None else "value"

    def walk_tile(self, writes: str, precise: bool = False, counts_decays: bool = False) -> WalkTile:
        read, write = self.sizes(writes)
        if not self.by_channel:
            return self.tile_of(read, write, self.walk_precision(precise), counts_decays)
        # What is prepared of a chunk serves the walks that write either axis.
        precision, largest = self.walk_precision(precise=False), max(read, write)
        chunk = self.tile_of(largest, largest, precision).chunk
        return self.tile_of(read, write, precision)._replace(chunk=chunk)

    def tile_of(self, read: int, write: int, precision: str, counts_decays: bool = False) -> WalkTile:
        return walk_tile(self.architecture, read, write, precision, self.dtype, self.decays, self.small, counts_decays)

    def count_chunks(self, length: int, chunk: int) -> int:
        """As many as :func:`fulmen.triton_common.operands.chunk_index` has numbers for."""
        packed = self.partition.cu_seqlens is not None
        return length // chunk + self.sequences if packed else triton.cdiv(length, chunk)

    def rows(self, axis: str, later: Tensor | None, earlier: Tensor, scale: float, precise: bool = False) -> Rows:
        """What walks read of an axis. ``precise``: the gradient of the other axis' decay depends on it."""
        decay = self.logs.of_axis(axis)
        if decay[0] is None or later is None:
            return Rows(later, earlier, scale)
        batch, length, _, size = earlier.shape
        chunk = self.walk_tile("value").chunk
        kept = torch.bfloat16 if self.dtype == torch.bfloat16 and not precise else torch.float32

        def new(size: int) -> Tensor:
            return earlier.new_empty(batch, length, self.heads, size, dtype=kept)

        self.chunks.pop(axis, None)  # they are found again
        later_in, earlier_out, scores = new(size), new(size), new(chunk)
        given = self.tokens(later), self.tokens(earlier), *decay
        found = self.tokens(later_in), self.tokens(earlier_out), self.tokens(scores)
        chunks = self.chunks[axis] = self.prepare(given, found, scale, earlier, precise)
        programs, numbers = self.programs_of_chunks(chunks)
        if programs > 0:
            tile = merge_tile(self.architecture, chunk, size)
            merge_blocks[(programs,)](
                *given, *found, self.tokens(chunks.left_out), *numbers, scale,
                C=chunk, D=padded(size), K=tile.width, LEVELS=chunk.bit_length() - 1,
                PRECISION=self.pair_precision(precise), **tile.options,
            )  # fmt: skip
        return Rows(later_in, earlier_out, 1.0, scores, chunks.totals)

    def chunks_of(self, axis: str, like: Tensor) -> Chunks:
        """Of an axis whose channels decay; ``like``: any tensor with the tokens."""
        if axis not in self.chunks:
            given = None, None, *self.logs.of_axis(axis)
            self.chunks[axis] = self.prepare(given, (None, None, None), 1.0, like)
        return self.chunks[axis]

    def prepare(
        self, given: tuple[Tokens | None, ...], found: tuple[Tokens | None, ...], scale: float, like: Tensor,
        precise: bool = False,
    ) -> Chunks:  # fmt: skip
        decay, (batch, length) = given[2], like.shape[:2]
        assert decay is not None
        chunk = self.walk_tile("value").chunk
        shape = batch, self.count_chunks(length, chunk), self.heads, decay.size
        chunks = Chunks(like.new_empty(shape, dtype=torch.float32), like.new_empty(shape, dtype=torch.int8))
        programs, numbers = self.programs_of_chunks(chunks)
        if programs > 0:
            tile = prepare_tile(self.architecture, chunk, decay.size)
            prepare[(programs,)](
                *given, *found, self.tokens(chunks.totals), self.tokens(chunks.left_out), *numbers, scale,
                C=chunk, D=padded(decay.size), K=tile.width, PRECISION=self.pair_precision(precise), **tile.options,
            )  # fmt: skip
        return chunks

    def programs_of_chunks(self, chunks: Chunks) -> tuple[int, tuple[Any, ...]]:
        """One for each chunk of each head, and what they find it by."""
        batch, count = chunks.totals.shape[:2]
        return batch * count * self.heads, (*self.partition[:2], count, self.sequences, self.heads)

    def walk(
        self,
        x: Tensor | None,
        y: Tensor | None,
        z: Tensor | None,
        result: Tensor | None,
        *,
        walk: str,
        rows: Rows,
        entering: Tensor | None,
        leaving: Tensor | None = None,
        row_sums: RowSums | None = None,
        precise: bool = False,
        one_by_one: bool = False,
        carry: bool = False,
    ) -> None:
        """
        Args:
            walk: the one of :data:`WALKS` that computes ``result``, or a summary.
            rows: what x and y are of.
            precise: whether the gradient of a decay depends on it.
            one_by_one: walk a segment after the other, each from what left the one before.
            carry: the same in one launch, that leaves the state at every boundary.
        """
        writes, segments = WALKS.get(walk, self.summary_writes), self.partition.segments
        read_size, write_size = self.sizes(writes)
        tile = self.walk_tile(writes, precise, row_sums is not None and row_sums.counts_decays)
        walked = 1 if one_by_one or carry else segments
        programs = self.sequences * walked * self.heads * triton.cdiv(write_size, tile.width)
        if programs == 0:
            return
        transposed = (writes == "key") != tile.mirrored
        decay, read_decay, write_decay = self.decays_of_walk(writes, rows)
        pairs = x is not None and y is not None
        chunks = self.chunks_of(writes, x) if write_decay is not None and pairs and x is not None else None
        firsts = [0] if carry else range(0, segments, walked)
        for first in reversed(firsts) if walk in BACKWARD else firsts:
            walk_kernel[(programs,)](
                self.tokens(x), self.tokens(y), self.tokens(z), self.tokens(result), decay, read_decay, write_decay,
                self.tokens(rows.scores), self.tokens(rows.totals),
                *((None, None) if chunks is None else (self.tokens(chunks.totals), self.tokens(chunks.left_out))),
                self.states(operands.readable_state(entering), transposed), self.states(leaving, transposed),
                *self.row_sums(row_sums, transposed), first, walked, self.starts_empty,
                *self.partition, self.heads, read_size, write_size, rows.scale,
                C=tile.chunk, R=padded(read_size), W=tile.width, MIRRORED=tile.mirrored,
                WHOLE=read_size == padded(read_size) and write_size % tile.width == 0,
                PER_TOKEN=self.per_token, WALK=walk, WRITES=writes, CARRY=carry,
                PRECISION=self.walk_precision(precise),
                **tile.options,
            )  # fmt: skip
        if chunks is not None:
            self.add_merged_pairs(x, y, z, result, rows, row_sums, chunks, walk, tile.chunk)

    def decays_of_walk(self, writes: str, rows: Rows) -> tuple[Tokens | None, Tokens | None, Tokens | None]:
        """Of all channels, and of those that are read and written. What was prepared has them in it."""
        if not self.by_channel:
            return self.logs.scalar, None, None
        of_read, of_written = (self.logs.of_axis(axis) for axis in (OTHER[writes], writes))
        if rows.totals is not None:
            of_read = None, None
        beside = of_written[1] if of_read[1] is None else of_read[1]
        return beside, of_read[0], of_written[0]

    def add_merged_pairs(
        self, x: Tensor | None, y: Tensor | None, z: Tensor | None, result: Tensor | None,
        rows: Rows, row_sums: RowSums | None, chunks: Chunks, walk: str, chunk: int,
    ) -> None:  # fmt: skip
        """What a walk left out. The gradient of the decay gets it after the walk backward in time."""
        backward, gradient = walk in BACKWARD, None
        if row_sums is not None and backward:
            gradient = row_sums.sums
        if result is gradient is None:
            return
        if rows.scores is not None:
            x = y = None
        programs, numbers = self.programs_of_chunks(chunks)
        tile = merge_tile(self.architecture, chunk, max(self.key_size, self.value_size))
        add_merged_pairs[(programs,)](
            self.tokens(x), self.tokens(y), self.tokens(z),
            None if gradient is None or row_sums is None else self.tokens(row_sums.factor),
            self.tokens(rows.scores), *self.logs.of_axis(WALKS[walk]), self.tokens(chunks.left_out),
            self.tokens(result), self.tokens(gradient), *numbers, rows.scale,
            C=chunk, D=padded(chunks.totals.shape[3]), K=tile.width, LEVELS=chunk.bit_length() - 1, BACKWARD=backward,
            PRECISION=self.pair_precision(precise=gradient is not None), **tile.options,
        )  # fmt: skip

    def walk_precision(self, precise: bool) -> str:
        return precision_of(self.dtype, self.architecture, self.decays, (self.key_size, self.value_size), precise)

    def pair_precision(self, precise: bool) -> str:
        """Of what is found of the pairs of a chunk where channels decay each by itself."""
        if precise or self.dtype == torch.float32:
            return self.walk_precision(precise)
        return "two terms"

    def row_sums(self, row_sums: RowSums | None, transposed: bool) -> tuple[Any, Any, Any, Any]:
        if row_sums is None:
            return None, None, None, None
        return (
            self.tokens(row_sums.factor),
            numbers(row_sums.sums),
            numbers(row_sums.crossing),
            self.states(operands.readable_state(row_sums.boundaries), transposed),
        )

    def sum_decay_gradient(self, forward: Tensor, backward: Tensor, crossing: Tensor, gradient: Tensor) -> None:
        """``gradient`` ``[B, N, H]`` of a decay per token, from what the walks left."""
        programs = self.sequences * self.partition.segments * self.heads
        if programs == 0:
            return
        tile = sum_tile(1)
        sum_decay_gradient[(programs,)](
            self.logs.scalar, numbers(forward), numbers(backward), numbers(crossing), self.tokens(gradient),
            self.starts_empty, *self.partition, self.heads,
            C=tile.chunk, TILES=backward.shape[2] // self.heads, **tile.options,
        )  # fmt: skip

    def sum_before(self, sums: Tensor, crossing: Tensor) -> None:
        """The gradient in place of ``sums``, where all that has an effect are the states at boundaries."""
        rows = numbers(sums)
        assert rows is not None
        tile, heads = sum_tile(rows.size), sums.shape[2]
        programs = self.sequences * self.partition.segments * heads * triton.cdiv(rows.size, tile.width)
        if programs == 0:
            return
        sum_before[(programs,)](
            rows, numbers(crossing), *self.partition, heads, C=tile.chunk, K=tile.width, **tile.options,
        )  # fmt: skip

    def fold(self, boundaries: Tensor, *, backward: bool = False) -> None:
        """Turn what segments add, at the boundaries after them, into the states there."""
        tile = fold_tile()
        rows, width = min(tile.chunk, padded(self.key_size)), min(tile.width, padded(self.value_size))
        programs = self.sequences * self.heads
        programs *= triton.cdiv(self.key_size, rows) * triton.cdiv(self.value_size, width)
        if programs == 0:
            return
        fold[(programs,)](
            self.states(boundaries),
            None if self.per_token or self.logs.beside is not None else self.logs.scalar,
            self.totals(self.logs.scalar if self.per_token else self.logs.beside, boundaries),
            self.totals(self.logs.key, boundaries),
            self.totals(self.logs.value, boundaries),
            *self.partition, self.heads, self.key_size, self.value_size,
            R=rows, W=width, BACKWARD=backward, **tile.options,
        )  # fmt: skip

    def totals(self, decay: Tokens | None, like: Tensor) -> Tokens | None:
        """The sums of a decay's logarithms over each segment, ``[sequences, segments, H, K]``."""
        if decay is None:
            return None
        sums = like.new_empty(self.sequences, self.partition.segments, self.heads, decay.size)
        tile = sum_tile(decay.size)
        programs = self.sequences * self.partition.segments * self.heads * triton.cdiv(decay.size, tile.width)
        sum_segments[(programs,)](
            decay, self.tokens(sums), *self.partition, self.heads,
            C=tile.chunk, K=tile.width, **tile.options,
        )  # fmt: skip
        return self.tokens(sums)

    def recur(
        self, q: Tensor, k: Tensor, v: Tensor, output: Tensor, scale: float,
        entering: Tensor | None, leaving: Tensor | None,
    ) -> None:  # fmt: skip
        tile = recurrent_tile(self.key_size, self.value_size)
        programs = self.sequences * self.heads * triton.cdiv(self.value_size, tile.width)
        if programs == 0:
            return
        decay = self.logs.scalar if self.logs.key is None else self.logs.key
        recur[(programs,)](
            self.tokens(q), self.tokens(k), self.tokens(v), decay, self.logs.value, self.tokens(output),
            self.states(operands.readable_state(entering)), self.states(leaving), *self.partition, self.heads, scale,
            D=padded(self.key_size), E=tile.width, PER_TOKEN=self.per_token,
            PER_CHANNEL=self.logs.key is not None, **tile.options,
        )  # fmt: skip

    def clear_rest(self, *results: Tensor | None) -> None:
        """Zeros after the last packed sequence. Whether there is anything, only the device knows."""
        if self.partition.cu_seqlens is None:
            return
        for result in results:
            if result is None or result.ndim < 3 or result.numel() == 0:
                continue
            _, length, heads, *size = result.shape
            tile = sum_tile(size[0] if size else 1)
            clear_rest[(triton.cdiv(length, UNIT.value) * heads,)](
                operands.tokens(result, heads), self.partition.cu_seqlens, length, self.sequences, heads,
                C=UNIT.value, K=tile.width, **tile.options,
            )  # fmt: skip

    def tokens(self, x: Tensor | None) -> Tokens | None:
        return None if x is None else operands.tokens(x, self.heads)

    def states(self, x: Tensor | None, transposed: bool = False) -> operands.States | None:
        return None if x is None else operands.states(x, transposed)


def precision_of(
    dtype: torch.dtype, architecture: Architecture, decays: Decays, sizes: tuple[int, int], precise: bool = False
) -> str:  # fmt: skip
    """How walks compute the products of results that are rounded to ``dtype``: no better than the inputs are.
    Where rows were rounded when they were prepared, the state that they read is not rounded as much.

    ``precise``: the gradient of a decay depends on it. Those of channels take away what they added, and one for a whole
    head beside them adds what is left over all tokens, and every token's error with it as often as there are tokens
    before it; where both axes decay by channel, rows as well as states have several terms; and of few channels
    (``sizes``: of keys and values) errors do not average out.
    """
    by_channel = decays.channel_axes > 0
    terms = {torch.bfloat16: 1 + by_channel, torch.float16: 2 + by_channel}.get(dtype)
    if terms is None:
        return architecture.single
    if precise and ((by_channel and decays.key.by_head) or decays.channel_axes == 2 or few_channels(*sizes)):
        terms = 3
    elif precise and not by_channel:
        terms = 2
    return ("one term", "two terms", "three terms")[terms - 1]


def numbers(x: Tensor | None) -> Tokens | None:
    """One for each token of each of its own heads."""
    return None if x is None else operands.tokens(x, x.shape[2])


def log_decays_of(p: Attention | States, heads: int) -> LogDecays:
    def tokens(log_decay: Tensor | None) -> Tokens | None:
        if log_decay is None:
            return None
        # One per head is that of a single token.
        of_head = not DecayForm.of(log_decay).has_tokens
        rows = log_decay.contiguous()[None, None] if of_head else operands.readable(log_decay)
        return operands.tokens(rows, heads)

    key, value = tokens(p.log_decay), tokens(p.log_decay_v)
    if p.decays.key.by_channel:
        return LogDecays(None, key, value, None)
    beside = None
    if p.log_decay is not None and value is not None:
        beside = operands.tokens(p.log_decay.expand(*p.k.shape[:2], heads), heads)
    return LogDecays(key, None, value, beside)
