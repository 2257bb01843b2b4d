"""What does not depend on the state where every channel of the keys has a decay of its own, of all chunks in parallel.
The same of the values, where they do: with do for q and v for k.

With cum_i the sum of a chunk's logarithms up to its token i, and total that of all its tokens:

    q_in_i = scale e^cum_i ⊙ q_i          k_out_j = e^(total - cum_j) ⊙ k_j          neither larger than q and k
    A_ij = scale q_i · (e^(cum_i - cum_j) ⊙ k_j)  for j ≤ i, else 0

So the walks that read the keys' axis (:mod:`.walk`) have the products of a scalar decay and no exponentials.

e^(cum_i - cum_j) is a number for each channel, and no weight of a pair. But with m = cum in the middle of the chunk it
is e^(cum_i - m) e^(m - cum_j), and A one product of two matrices. One of the two factors is above 1, so that holds
while none is beyond 2^REACH. Where a channel of a chunk decays more, the chunk is merged from blocks of 1, 2, 4, ...
tokens (:mod:`.inside_chunk`), which always holds and takes many times as long: by a kernel of its own, whose programs
end at once where the chunk has no need of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fulmen.ops.linear_attention.triton.inside_chunk import scores as merged_scores
from fulmen.triton_common.decays import LOG2_E, channel_logs, channel_weights, entering_mask
from fulmen.triton_common.naming import named
from fulmen.triton_common.operands import Partition, chunk_place, load_rows, row_of, store_rows
from fulmen.triton_common.products import product, sum_where

# Rows are then exact from 2^-86 to 2^88, and in :mod:`.walk`, where one factor has both halves of the chunk, from 2^-46
# to 2^48. Pairs of a later token that an earlier one would read are computed too, may be
# anything, and are dropped.
REACH = tl.constexpr(40.0)
NUMBERS = ("length", "chunks", "sequences")  # for which Triton shall not compile a kernel again


@triton.jit(repr=named("linear_attention_prepare"), do_not_specialize=NUMBERS)
def prepare(
    q, k,  # Tokens; or None, where only chunks are of interest
    decay, scalar,  # Tokens; a decay beside it, or None
    q_in, k_out, scores,  # Tokens or None; A has a row [C] for each token
    totals, left_out,  # of each channel of a chunk: e^total, and whether it reaches too far
    cu_seqlens, length, chunks, sequences, heads, scale,
    C: tl.constexpr, D: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    partition = Partition(cu_seqlens, length, 1, length)
    program = tl.program_id(0)
    head, number = program % heads, program // heads
    batch, t, valid = chunk_place(partition, number, chunks, sequences, C)
    if valid > 0:
        rows, chunk = tl.arange(0, C), number - batch * chunks
        row, token = rows[:, None], rows[None, :]
        # Which tokens stand between each row and the middle: after it, or with the other sign before it.
        between = tl.where(token < C // 2, token > row, token <= row)
        from_middle = tl.where(between, tl.where(token < C // 2, -1.0, 1.0), 0.0)
        pairs = tl.zeros([C, C], tl.float32)
        for channel in tl.static_range(0, D, K):
            columns = channel + tl.arange(0, K)
            logs = channel_logs(decay, batch, t, head, rows, valid, columns, scalar)
            first = tl.sum(tl.where(row < C // 2, logs, 0.0), 0) * LOG2_E
            second = tl.sum(tl.where(row < C // 2, 0.0, logs), 0) * LOG2_E
            # From the logarithms, for Triton 3.7.1 fails on a maximum of the product's result on sm_100.
            of_first = tl.sum(tl.where(row < C // 2, tl.abs(logs), 0.0), 0)
            of_second = tl.sum(tl.where(row < C // 2, 0.0, tl.abs(logs)), 0)
            exist = columns < decay.size
            tl.store(row_of(totals, batch, chunk, head) + columns, tl.exp2(first + second), mask=exist)
            too_far = tl.maximum(of_first, of_second) * LOG2_E > REACH
            tl.store(row_of(left_out, batch, chunk, head) + columns, too_far.to(tl.int8), mask=exist)
            if q is not None:
                distance = sum_where(from_middle, logs) * LOG2_E
                q_rows = load_rows(q, batch, t, head, rows, valid, columns) * tl.exp2(distance)
                k_rows = load_rows(k, batch, t, head, rows, valid, columns) * tl.exp2(-distance)
                pairs += product(q_rows, tl.trans(k_rows), PRECISION)
                store_rows(q_in, batch, t, head, rows, valid, columns, q_rows * (scale * tl.exp2(first))[None, :])
                store_rows(k_out, batch, t, head, rows, valid, columns, k_rows * tl.exp2(second)[None, :])
        if q is not None:
            store_rows(scores, batch, t, head, rows, valid, rows, tl.where(row >= token, pairs * scale, 0.0))


@triton.jit
def any_left_out(left_out, batch, chunk, head, valid, D: tl.constexpr):
    """Whether a channel of a chunk is; there are D of them, or fewer."""
    columns = tl.arange(0, D)
    exist = (columns < left_out.size) & (valid > 0)
    found = tl.load(row_of(left_out, batch, chunk, head) + columns, mask=exist, other=0)
    return tl.max(found.to(tl.int32), 0) > 0


@triton.jit(repr=named("linear_attention_merge_blocks"), do_not_specialize=NUMBERS)
def merge_blocks(
    q, k, decay, scalar, q_in, k_out, scores, left_out,
    cu_seqlens, length, chunks, sequences, heads, scale,
    C: tl.constexpr, D: tl.constexpr, K: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same of the chunks that reach too far."""
    partition = Partition(cu_seqlens, length, 1, length)
    program = tl.program_id(0)
    head, number = program % heads, program // heads
    batch, t, valid = chunk_place(partition, number, chunks, sequences, C)
    if any_left_out(left_out, batch, number - batch * chunks, head, valid, D):
        rows = tl.arange(0, C)
        pairs = tl.zeros([C, C], tl.float32)
        for channel in range(0, k.size, K):
            columns = channel + tl.arange(0, K)
            k_rows = load_rows(k, batch, t, head, rows, valid, columns)
            logs = channel_logs(decay, batch, t, head, rows, valid, columns, scalar)
            q_rows = load_rows(q, batch, t, head, rows, valid, columns).to(tl.float32) * scale
            q_weights = channel_weights(logs, entering_mask(rows, False))
            k_weights = channel_weights(logs, entering_mask(rows, True))
            store_rows(q_in, batch, t, head, rows, valid, columns, q_rows * q_weights)
            store_rows(k_out, batch, t, head, rows, valid, columns, k_rows * k_weights)
            pairs += merged_scores(q_rows, k_rows, logs, rows, LEVELS, False, PRECISION)
        pairs = tl.where(rows[:, None] >= rows[None, :], pairs, 0.0)
        store_rows(scores, batch, t, head, rows, valid, rows, pairs)
