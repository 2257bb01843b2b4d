"""Kernels for the states alone: what segments add to them, and folding that into the states at their boundaries."""

from __future__ import annotations

import triton
import triton.language as tl

from fulmen.ops.linear_attention.triton.inside_chunk import contribution
from fulmen.ops.linear_attention.triton.naming import decays
from fulmen.triton_common.decays import channel_logs, decayed, entering_mask, scalar_logs
from fulmen.triton_common.naming import Compiled, named
from fulmen.triton_common.operands import (
    PARTITION_NUMBERS,
    Partition,
    load_rows,
    load_state,
    place,
    row_of,
    slices,
    store_state,
    zero_state,
)


def words_of_summary(summarise: Compiled) -> tuple[str, ...]:
    head = summarise.has("decay") and not summarise["PER_TOKEN"]
    form = decays(head, summarise["PER_TOKEN"], summarise.has("read_decay"), summarise.has("write_decay"))
    return "carried" if summarise["CARRY"] else "", "backward" if summarise["BACKWARD"] else "", form


@triton.jit(
    repr=named("linear_attention_summarise", words_of_summary), do_not_specialize_on_alignment=PARTITION_NUMBERS
)
def summarise(
    y, z, decay, read_decay, write_decay, boundaries,
    cu_seqlens, length, segments, segment_tokens, heads, scale,
    C: tl.constexpr, R: tl.constexpr, S: tl.constexpr, W: tl.constexpr,
    PER_TOKEN: tl.constexpr, BACKWARD: tl.constexpr, CARRY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What each segment adds to the state: S = Σ_j (w_j ⊙ y_j) z_jᵀ, w_j the decay from j to the segment's end (or,
    backward in time, to its start). Written to the boundary after the segment.

    With ``CARRY`` one program walks all segments and the state goes along, from the one at the first boundary.
    """
    partition = Partition(cu_seqlens, length, segments, segment_tokens)
    tiles = tl.cdiv(z.size, W)
    program = tl.program_id(0)
    tile, head = program % tiles, program // tiles % heads
    rows, reads, writes = tl.arange(0, C), slices(R, S), tile * W + tl.arange(0, W)
    leave = entering_mask(rows, not BACKWARD)
    state = zero_state(R, S, W)
    if CARRY:
        sequence, own, count = program // (tiles * heads), 0, partition.segments
        state = load_state(boundaries, sequence, head, sequence * 0, reads, writes, y.size, z.size)
    else:
        own, sequence = program // (tiles * heads) % partition.segments, program // (tiles * heads * partition.segments)
        count = 1
    for i in range(0, count):
        segment = own + i
        batch, _, first, last = place(partition, sequence, segment)
        steps = tl.cdiv(last - first, C).to(tl.int32)
        for step in tl.range(0, steps, disable_licm=True):  # as in scan
            t = first + step * C
            if BACKWARD:
                t = first + (steps - 1 - step) * C
            valid = last - t
            logs, read_logs, write_logs = None, None, None
            if decay is not None:
                logs = scalar_logs(decay, batch, t, head, rows, valid, PER_TOKEN)
            if read_decay is not None:
                read_logs = channel_logs(read_decay, batch, t, head, rows, valid, reads)
            if write_decay is not None:
                write_logs = channel_logs(write_decay, batch, t, head, rows, valid, writes)
            y_rows = load_rows(y, batch, t, head, rows, valid, reads)
            z_rows = load_rows(z, batch, t, head, rows, valid, writes)
            state = decayed(state, logs, read_logs, write_logs)
            state += scale * contribution(y_rows, z_rows, logs, read_logs, write_logs, leave, PRECISION)
        after = program * 0 + segment
        if not BACKWARD:
            after += 1
        store_state(boundaries, sequence, head, after, reads, writes, y.size, z.size, state)


@triton.jit(repr=named("linear_attention_sum_log_decays"), do_not_specialize_on_alignment=PARTITION_NUMBERS)
def sum_segments(
    decay, totals, cu_seqlens, length, segments, segment_tokens, heads, C: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """``totals`` ``[sequences, segments, H, K]``: the sum of the logarithms of a decay over each segment."""
    partition = Partition(cu_seqlens, length, segments, segment_tokens)
    tiles = tl.cdiv(decay.size, K)
    program = tl.program_id(0)
    tile, head = program % tiles, program // tiles % heads
    segment, sequence = program // (tiles * heads) % partition.segments, program // (tiles * heads * partition.segments)
    batch, _, first, last = place(partition, sequence, segment)
    rows, columns = tl.arange(0, C), tile * K + tl.arange(0, K)
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
