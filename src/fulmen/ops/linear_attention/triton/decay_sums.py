"""The kernels that make the gradient of a decay of what walks left of each token (:mod:`.walk`)."""

from __future__ import annotations

import triton
import triton.language as tl

from fulmen.triton_common.naming import named
from fulmen.triton_common.operands import (
    PARTITION_NUMBERS,
    Partition,
    channels_of_segment,
    load_column,
    load_row,
    load_rows,
    place,
    row_of,
    store_rows,
)

LOG_NOTHING = tl.constexpr(-24.0 * 0.6931471805599453)  # e^LOG_NOTHING is nothing beside 1, in float32


@triton.jit(repr=named("linear_attention_decay_gradient"), do_not_specialize_on_alignment=PARTITION_NUMBERS)
def sum_decay_gradient(
    decay, forward, backward, crossing, gradient,
    starts_empty, cu_seqlens, length, segments, segment_tokens, heads,
    C: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The gradient of a decay per token at every token of a segment, ``[B, N, H]``.

    The pairs of tokens on both sides of a token's decay, itself on the later side, are those of the next token but for
    what ends and begins here: g_t = g_{t+1} + q_t · dq_t - k_t · dk_t, and after the segment Σ S ⊙ dS. That subtracts,
    so it starts again with every segment; and where a decay leaves nothing, no pair is on both sides, and g_t = 0.
    """
    partition = Partition(cu_seqlens, length, segments, segment_tokens)
    program = tl.program_id(0)
    head = program % heads
    segment, sequence = program // heads % partition.segments, program // (heads * partition.segments)
    batch, start, first, last = place(partition, sequence, segment)
    rows = tl.arange(0, C)
    carried = tl.zeros([1], tl.float32)
    for tile in tl.static_range(TILES):
        carried += tl.load(row_of(crossing, sequence.to(tl.int64), segment, head * TILES + tile))
    steps = tl.cdiv(last - first, C).to(tl.int32)
    for step in range(0, steps):
        t = first + (steps - 1 - step) * C
        valid = (last - t).to(tl.int32)
        change = tl.zeros([C], tl.float32)
        for tile in tl.static_range(TILES):
            change += load_column(forward, batch, t, head * TILES + tile, rows, valid, 0)
            change -= load_column(backward, batch, t, head * TILES + tile, rows, valid, 0)
        log = load_column(decay, batch, t, head, rows, valid, 0)
        crosses = (log > LOG_NOTHING) & ((t + rows > start) | (starts_empty == 0))
        crosses = tl.where(rows < valid, crosses.to(tl.float32), 1.0)
        kept, found = tl.associative_scan((crosses, crosses * change), 0, then, reverse=True)
        found += kept * carried
        tl.store(row_of(gradient, batch, t, head) + rows * gradient.token, found, mask=rows < valid)
        carried = tl.sum(tl.where(rows == 0, found, 0.0)[None, :], 1)


@triton.jit
def then(kept, found, then_kept, then_found):
    """First the one step of g ← kept · g + found, then the other."""
    return kept * then_kept, found * then_kept + then_found


@triton.jit(repr=named("linear_attention_sum_before"), do_not_specialize_on_alignment=PARTITION_NUMBERS)
def sum_before(
    sums, crossing, cu_seqlens, length, segments, segment_tokens, heads, C: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """The gradient at every token where tokens have an effect through the states at boundaries alone: of the pairs of
    each earlier token of the segment with what is after it, Σ_{j<t} k_j ⊙ dk_j, and of what crosses the whole segment.

    ``sums`` have k_j ⊙ dk_j in the place of the next token, which gets its gradient there.
    """
    partition = Partition(cu_seqlens, length, segments, segment_tokens)
    columns, head, segment, sequence = channels_of_segment(partition, sums.size, heads, K)
    batch, _, first, last = place(partition, sequence, segment)
    rows = tl.arange(0, C)
    held = load_row(crossing, sequence.to(tl.int64), segment, head, columns)
    for step in range(0, tl.cdiv(last - first, C).to(tl.int32)):
        t = first + step * C
        found = load_rows(sums, batch, t, head, rows, last - t, columns)
        found = tl.where(t + rows[:, None] > first, found, 0.0)
        tl.debug_barrier()  # all warps have read what they overwrite
        store_rows(sums, batch, t, head, rows, last - t, columns, held[None, :] + tl.cumsum(found, 0))
        held += tl.sum(found, 0)
