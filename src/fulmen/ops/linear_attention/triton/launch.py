"""Launching the kernels: what the launches of one call have in common, and one method for each kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fulmen.ops.chunks.decay_form import DecayForm, Decays
from fulmen.ops.linear_attention.problem import Attention, States
from fulmen.ops.linear_attention.triton.merged_pairs import add_merged_pairs
from fulmen.ops.linear_attention.triton.prepare import merge_blocks, prepare
from fulmen.ops.linear_attention.triton.recurrent import recur
from fulmen.ops.linear_attention.triton.scan import scan
from fulmen.ops.linear_attention.triton.states import fold, sum_segments, summarise
from fulmen.ops.linear_attention.triton.tiles import (
    fold_tile,
    merge_tile,
    prepare_tile,
    recurrent_tile,
    scan_tile,
    sum_tile,
    walk_tile,
)
from fulmen.ops.linear_attention.triton.walk import sum_decay_gradient
from fulmen.ops.linear_attention.triton.walk import walk as walk_kernel
from fulmen.runtime.architectures import Architecture, architecture_of
from fulmen.triton_common import operands
from fulmen.triton_common.operands import UNIT, Partition, Tokens
from fulmen.triton_common.packed import clear_rest
from fulmen.triton_common.tiles import Tile, WalkTile, padded

# The axis of the states that a walk writes, by what it computes.
WALKS = {"output": "value", "dq": "key", "dk": "key", "dv": "value", "summary": "key", "summary_backward": "key"}
BACKWARD = ("dk", "dv", "summary_backward")  # in time
# Below this many tokens a segment does not pay for the extra pass over k and v that finds the states between segments.
SHORTEST_SEGMENT = 256


class LogDecays(NamedTuple):
    """The log-decays of a call as the kernels take them: a scalar one, and those of each axis' channels."""

    scalar: Tokens | None
    key: Tokens | None
    value: Tokens | None


class Rows(NamedTuple):
    """What walks that write the value axis read: q and k, or what :mod:`.prepare` made of them. And what it found of
    chunks, which all walks read."""

    q: Tensor | None  # None where there is none
    k: Tensor
    scale: float
    scores: Tensor | None = None  # [B, N, H, C]
    totals: Tensor | None = None  # [B, chunks, H, D]
    reach: Tensor | None = None  # [B, chunks, H]


@dataclass(frozen=True)
class RowSums:
    """What a walk leaves for the gradient of a decay; see :mod:`fulmen.ops.linear_attention.triton.walk`."""

    factor: Tensor  # of the results in the loss: q or k
    sums: Tensor  # [B, N, H * tiles]; with a decay per channel [B, N, H, D]
    crossing: Tensor | None  # [sequences, segments, H * tiles], for the walk backward in time and a scalar decay
    boundaries: Tensor | None  # the states there


@dataclass(frozen=True)
class Gradient:
    """What a scan needs to collect the gradient of the decay of the axis it writes."""

    factor: Tensor  # of the results in the loss: q, k, v or the output's gradient
    parts: Tensor  # see :class:`DecayGradient`
    given: Tensor | None  # written by the forward walk, read by the backward walk
    boundaries: Tensor | None  # the states at the boundaries, for the backward walk


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

    def precision(self, of_halves: str) -> str:
        """How products are computed; see :mod:`fulmen.triton_common.products`."""
        return self.architecture.single if self.dtype == torch.float32 else of_halves

    def sizes(self, writes: str) -> tuple[int, int]:
        """The sizes of the read and the written axis."""
        sizes = self.key_size, self.value_size
        return sizes if writes == "value" else (sizes[1], sizes[0])

    @property
    def heads_fill_the_card(self) -> bool:
        """Whether a program for each tile of each head's state leaves none of the card idle."""
        if torch.are_deterministic_algorithms_enabled():
            return True  # bits then do not depend on the batch
        tiles = triton.cdiv(self.value_size, self.scan_tile("value", gradient=False).width)
        return self.sequences * self.heads * tiles >= self.architecture.multiprocessors

    def scan_tile(self, writes: str, gradient: bool) -> Tile:
        read, write = self.sizes(writes)
        return scan_tile(self.architecture, read, write, self.dtype, self.decays, gradient, self.small)

    @property
    def of_keys(self) -> bool:
        """Whether the channels of the keys decay, and only they."""
        return decays_of_keys(self.decays)

    @property
    def walks_serve(self) -> bool:
        """Whether :func:`walk` does, and not :func:`scan`."""
        return self.decays.channel_axes == 0 or self.of_keys

    def walk_tile(self, writes: str, precise: bool = False) -> WalkTile:
        precision = self.walk_precision(precise)
        tile = walk_tile(self.architecture, *self.sizes(writes), precision, self.small, self.of_keys)
        if self.of_keys:  # what is prepared of a chunk serves the walks that write either axis
            largest = max(self.key_size, self.value_size)
            of_either = walk_tile(self.architecture, largest, largest, precision, self.small, self.of_keys)
            tile = tile._replace(chunk=of_either.chunk)
        return tile

    def chunks(self, length: int, chunk: int) -> int:
        """As many as :func:`fulmen.triton_common.operands.chunk_index` has numbers for."""
        packed = self.partition.cu_seqlens is not None
        return length // chunk + self.sequences if packed else triton.cdiv(length, chunk)

    def prepare(self, p: Attention | States) -> Rows:
        """What walks read besides the values."""
        q, scale = (p.q, p.scale) if isinstance(p, Attention) else (None, 1.0)
        if not self.of_keys or q is None:
            return Rows(q, p.k, scale)
        batch, length = p.k.shape[:2]
        chunk = self.walk_tile("value").chunk
        chunks = self.chunks(length, chunk)
        kept = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32

        def new(size: int) -> Tensor:
            return p.k.new_empty(batch, length, self.heads, size, dtype=kept)

        q_in, k_out, scores = new(self.key_size), new(self.key_size), new(chunk)
        totals = p.k.new_empty(batch, chunks, self.heads, self.key_size, dtype=torch.float32)
        reach = p.k.new_empty(batch, chunks, self.heads, dtype=torch.float32)
        programs = batch * chunks * self.heads
        if programs > 0:
            given = self.tokens(q), self.tokens(p.k), self.logs.key
            found = self.tokens(q_in), self.tokens(k_out), self.tokens(scores)
            sizes = *self.partition[:2], chunks, self.sequences, self.heads, scale
            precision = self.precision("two terms")
            tile = prepare_tile(self.architecture, chunk, self.key_size)
            prepare[(programs,)](
                *given, *found, self.tokens(totals), self.tokens(reach), *sizes,
                C=chunk, D=padded(self.key_size), K=tile.width, PRECISION=precision, **tile.options,
            )  # fmt: skip
            tile = merge_tile(self.architecture, chunk, self.key_size)
            merge_blocks[(programs,)](
                *given, *found, self.tokens(reach), *sizes,
                C=chunk, K=tile.width, LEVELS=chunk.bit_length() - 1, PRECISION=precision, **tile.options,
            )  # fmt: skip
        return Rows(q_in, k_out, 1.0, scores, totals, reach)

    def add_merged_pairs(
        self, p: Attention, do: Tensor, rows: Rows, *,
        dq: Tensor | None = None, dk: Tensor | None = None, gradient: Tensor | None = None,
    ) -> None:  # fmt: skip
        """What the walks for dq and dk left out, for them and for the ``gradient`` of the decay after both."""
        if rows.reach is None or dq is dk is gradient is None:
            return
        chunk, chunks = self.walk_tile("key").chunk, rows.reach.shape[1]
        programs = rows.reach.numel()
        if programs == 0:
            return
        tile = merge_tile(self.architecture, chunk, max(self.key_size, self.value_size))
        add_merged_pairs[(programs,)](
            self.tokens(p.q), self.tokens(p.k), self.tokens(p.v), self.tokens(do), self.logs.key,
            self.tokens(rows.reach), self.tokens(dq), self.tokens(dk), self.tokens(gradient),
            *self.partition[:2], chunks, self.sequences, self.heads, p.scale,
            C=chunk, K=tile.width, LEVELS=chunk.bit_length() - 1, PRECISION=self.precision("two terms"),
            **tile.options,
        )  # fmt: skip

    def walk(
        self,
        x: Tensor | None,
        y: Tensor | None,
        z: Tensor | None,
        result: Tensor | None,
        *,
        walk: str,
        scale: float,
        entering: Tensor | None,
        rows: Rows,
        leaving: Tensor | None = None,
        row_sums: RowSums | None = None,
        precise: bool = False,
        one_by_one: bool = False,
    ) -> None:
        """``walk`` is the one of :data:`WALKS` that computes ``result``.

        Args:
            rows: what was prepared.
            precise: whether the gradient of a decay depends on it.
            one_by_one: walk a segment after the other, each from what left the one before.
        """
        writes, segments = WALKS[walk], self.partition.segments
        read_size, write_size = self.sizes(writes)
        tile = self.walk_tile(writes, precise)
        walked = 1 if one_by_one else segments
        programs = self.sequences * walked * self.heads * triton.cdiv(write_size, tile.width)
        if programs == 0:
            return
        transposed = (writes == "key") != tile.mirrored
        of_written = self.logs.key if writes == "key" else None
        scores = rows.scores if writes == "value" and y is not None else None
        firsts = range(0, segments, walked)
        for first in reversed(firsts) if walk in BACKWARD else firsts:
            walk_kernel[(programs,)](
                self.tokens(x), self.tokens(y), self.tokens(z), self.tokens(result),
                self.logs.scalar, of_written, self.tokens(scores), self.tokens(rows.totals), self.tokens(rows.reach),
                self.states(operands.readable_state(entering), transposed), self.states(leaving, transposed),
                *self.row_sums(row_sums, transposed), first, walked, self.starts_empty,
                *self.partition, self.heads, read_size, write_size, scale,
                C=tile.chunk, R=padded(read_size), W=tile.width, MIRRORED=tile.mirrored,
                WHOLE=read_size == padded(read_size) and write_size % tile.width == 0,
                PER_TOKEN=self.per_token, WALK=walk,
                PRECISION=self.walk_precision(precise),
                **tile.options,
            )  # fmt: skip

    def walk_precision(self, precise: bool) -> str:
        """Gradients of decays take away what they added. One for a whole head moreover adds what is left over all
        tokens, and every token's error with it as often as there are tokens before it."""
        if precise and not self.of_keys:
            return self.precision("two terms" if self.per_token else "three terms")
        return precision_of(self.dtype, self.architecture, self.of_keys)

    def row_sums(self, row_sums: RowSums | None, transposed: bool) -> tuple[Any, Any, Any, Any]:
        if row_sums is None:
            return None, None, None, None
        return (
            self.tokens(row_sums.factor),
            numbers(row_sums.sums),
            numbers(row_sums.crossing),
            self.states(row_sums.boundaries, transposed),
        )

    def sum_decay_gradient(
        self, forward: Tensor | None, backward: Tensor, crossing: Tensor, gradient: Tensor
    ) -> None:  # fmt: skip
        """``gradient`` ``[B, N, H]`` of a scalar decay, from what the walks left."""
        programs = self.sequences * self.partition.segments * self.heads
        if programs == 0:
            return
        tile = sum_tile(1)
        sum_decay_gradient[(programs,)](
            self.logs.scalar, numbers(forward), numbers(backward), numbers(crossing), self.tokens(gradient),
            self.starts_empty, *self.partition, self.heads,
            C=tile.chunk, TILES=backward.shape[2] // self.heads, PER_TOKEN=self.per_token, **tile.options,
        )  # fmt: skip

    def scan(
        self,
        x: Tensor,
        y: Tensor | None,
        z: Tensor | None,
        result: Tensor | None,
        *,
        walk: str,
        scale: float,
        entering: Tensor | None,
        leaving: Tensor | None = None,
        gradient: Gradient | None = None,
    ) -> None:
        """``walk`` is the one of :data:`WALKS` that computes ``result``."""
        writes = WALKS[walk]
        read_size, write_size = self.sizes(writes)
        tile = self.scan_tile(writes, gradient is not None)
        programs = self.sequences * self.partition.segments * self.heads * triton.cdiv(write_size, tile.width)
        if programs == 0:
            return
        transposed = writes == "key"
        channels = (self.logs.key, self.logs.value)
        scan[(programs,)](
            self.tokens(x), self.tokens(y), self.tokens(z), self.tokens(result),
            self.logs.scalar, *(reversed(channels) if transposed else channels),
            self.states(operands.readable_state(entering), transposed), self.states(leaving, transposed),
            *self.gradient(gradient, transposed), self.starts_empty,
            *self.partition, self.heads, write_size, scale,
            C=tile.chunk, R=padded(read_size), S=tile.slices, W=tile.width, LEVELS=tile.chunk.bit_length() - 1,
            PER_TOKEN=self.per_token, WALK=walk,
            PRECISION=self.precision("two terms" if gradient is None else "three terms"),
            **tile.options,
        )  # fmt: skip

    def gradient(self, gradient: Gradient | None, transposed: bool) -> tuple[Any, Any, Any, Any]:
        if gradient is None:
            return None, None, None, None
        return (
            self.tokens(gradient.factor),
            self.tokens(gradient.parts),
            self.tokens(gradient.given),
            self.states(gradient.boundaries, transposed),
        )

    def summarise(
        self,
        y: Tensor,
        z: Tensor,
        boundaries: Tensor,
        *,
        backward: bool = False,
        scale: float = 1.0,
        carry: bool = False,
    ) -> None:
        """Write what each segment adds to the boundary after it; with ``carry``, the states themselves."""
        tile = self.scan_tile("value", gradient=False)
        programs = self.sequences * self.heads * triton.cdiv(self.value_size, tile.width)
        programs *= 1 if carry else self.partition.segments
        if programs == 0:
            return
        summarise[(programs,)](
            self.tokens(y), self.tokens(z), self.logs.scalar, self.logs.key, self.logs.value,
            self.states(boundaries), *self.partition, self.heads, scale,
            C=tile.chunk, R=padded(self.key_size), S=tile.slices, W=tile.width, PER_TOKEN=self.per_token,
            BACKWARD=backward, CARRY=carry, PRECISION=self.precision("three terms"),
            **tile.options,
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
            None if self.per_token else self.logs.scalar,
            self.totals(self.logs.scalar if self.per_token else None, boundaries),
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


def precision_of(dtype: torch.dtype, architecture: Architecture, prepared: bool = False) -> str:
    """How walks compute the products of results that are rounded to ``dtype``: no better than the inputs are.
    Where rows were rounded when they were prepared, the state that they read is not rounded as much."""
    terms = ("one term", "two terms", "three terms")[prepared:]
    return dict(zip((torch.bfloat16, torch.float16), terms, strict=False)).get(dtype, architecture.single)


def decays_of_keys(decays: Decays) -> bool:
    """Whether they are per channel, of the keys' axis alone."""
    return decays.key.by_channel and decays.channel_axes == 1


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
    return LogDecays(None, key, value) if p.decays.key.by_channel else LogDecays(key, None, value)


def partition_attention(p: Attention, schedule: str, longest: int | None = None) -> tuple[Partition, int]:
    """How a schedule partitions the sequences into segments, of ``longest`` tokens at most (packed sequences: in the
    mean), and how many sequences there are."""
    length, sequences = p.q.shape[1], p.state_shape[0]
    if schedule in ("parallel", "recompute"):
        tokens = UNIT.value
    elif schedule == "auto" and not torch.are_deterministic_algorithms_enabled():
        architecture = architecture_of(p.q.device)
        programs, resident = programs_of(p, architecture)
        wanted = max(resident * architecture.multiprocessors // max(programs, 1), 1)
        tokens = max(
            triton.cdiv(triton.cdiv(length, sequences if p.cu_seqlens is not None else 1), wanted), SHORTEST_SEGMENT
        )
    else:
        tokens = length
    tokens = tokens if longest is None else min(tokens, longest)
    tokens = max(triton.cdiv(tokens, UNIT.value), 1) * UNIT.value
    if p.cu_seqlens is None:
        return Partition(None, length, max(triton.cdiv(length, tokens), 1), tokens), sequences
    return Partition(
        p.cu_seqlens.contiguous(), length, max(triton.cdiv(length, tokens * sequences), 1), tokens
    ), sequences


def programs_of(p: Attention, architecture: Architecture) -> tuple[int, int]:
    """Of a walk with one segment: how many there are, and how many a multiprocessor holds at once."""
    sizes, heads = (p.q.shape[3], p.v.shape[3]), p.state_shape[0] * p.heads
    of_keys = decays_of_keys(p.decays)
    if p.decays.channel_axes and not of_keys:
        of_scan = scan_tile(architecture, *sizes, p.q.dtype, p.decays, gradient=False, small=False)
        return heads * triton.cdiv(sizes[1], of_scan.width), 2
    tile = walk_tile(architecture, *sizes, precision_of(p.q.dtype, architecture, of_keys), False, of_keys)
    return heads * triton.cdiv(sizes[1], tile.width), tile.resident
