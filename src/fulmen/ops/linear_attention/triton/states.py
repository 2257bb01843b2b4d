"""Kernels for the states alone: folding what segments add to them into the states at their boundaries."""

from __future__ import annotations

import triton
import triton.language as tl

from fulmen.ops.linear_attention.triton.naming import decays
from fulmen.triton_common.naming import Compiled, named
from fulmen.triton_common.operands import (
    PARTITION_NUMBERS,
    Partition,
    channels_of_segment,
    load_rows,
    load_state,
    place,
    row_of,
    store_state,
)


@triton.jit(repr=named("linear_attention_sum_log_decays"), do_not_specialize_on_alignment=PARTITION_NUMBERS)
def sum_segments(
    decay, totals, cu_seqlens, length, segments, segment_tokens, heads, C: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """``totals`` ``[sequences, segments, H, K]``: the sum of the logarithms of a decay over each segment."""
    partition = Partition(cu_seqlens, length, segments, segment_tokens)
    columns, head, segment, sequence = channels_of_segment(partition, decay.size, heads, K)
    batch, _, first, last = place(partition, sequence, segment)
    rows = tl.arange(0, C)
    total = tl.zeros([K], tl.float32)
    for step in range(0, tl.cdiv(last - first, C).to(tl.int32)):
        t = first + step * C
        total += tl.sum(load_rows(decay, batch, t, head, rows, last - t, columns).to(tl.float32), 0)
    into = row_of(totals, sequence.to(tl.int64), segment, head) + columns
    tl.store(into, total, mask=columns < decay.size)


def words_of_fold(fold: Compiled) -> tuple[str, ...]:
    form = decays(*map(fold.has, ("head_decay", "scalar_totals", "read_totals", "write_totals")))
    return "backward" if fold["BACKWARD"] else "", form


@triton.jit(repr=named("linear_attention_fold", words_of_fold), do_not_specialize_on_alignment=PARTITION_NUMBERS)
def fold(
    boundaries, head_decay, scalar_totals, read_totals, write_totals,
    cu_seqlens, length, segments, segment_tokens, heads, read_size, write_size,
    R: tl.constexpr, W: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Turn what the segments add, at the boundaries after them, into the states at these boundaries, in place:
    S ← e^total ⊙ S + (what the segment adds), from the state at the first boundary (backward in time: at the last).
    """
    partition = Partition(cu_seqlens, length, segments, segment_tokens)
    read_tiles, write_tiles = tl.cdiv(read_size, R), tl.cdiv(write_size, W)
    program = tl.program_id(0)
    reads = program // write_tiles % read_tiles * R + tl.arange(0, R)
    writes = program % write_tiles * W + tl.arange(0, W)
    head, sequence = program // (write_tiles * read_tiles) % heads, program // (write_tiles * read_tiles * heads)
    begin = sequence * 0
    if BACKWARD:
        begin += partition.segments
    state = load_state(boundaries, sequence, head, begin, reads, writes, read_size, write_size)
    # What the next segments add is on its way meanwhile: no load is of what was stored here.
    for step in tl.range(0, partition.segments, num_stages=4):
        segment, after = begin + step, begin + step + 1
        if BACKWARD:
            segment, after = begin - step - 1, begin - step - 1
        added = load_state(boundaries, sequence, head, after, reads, writes, read_size, write_size)
        if head_decay is not None:
            _, _, first, last = place(partition, sequence, segment)
            log = tl.load(head_decay.pointer + head).to(tl.float32) * (last - first).to(tl.float32)
            state *= tl.exp(tl.where(last > first, log, 0.0))
        if scalar_totals is not None:
            state *= tl.exp(tl.load(row_of(scalar_totals, sequence, segment, head)))
        if read_totals is not None:
            logs = tl.load(row_of(read_totals, sequence, segment, head) + reads, mask=reads < read_size, other=0.0)
            state *= tl.exp(logs)[:, None]
        if write_totals is not None:
            logs = tl.load(row_of(write_totals, sequence, segment, head) + writes, mask=writes < write_size, other=0.0)
            state *= tl.exp(logs)[None, :]
        state += added
        store_state(boundaries, sequence, head, after, reads, writes, read_size, write_size, state)
