"""What pairs of tokens give to the results of :mod:`.walk` and to the decay's gradient, of the channels that reach too
far in a chunk, where the walk leaves it out. Blocks of 1, 2, 4, ... tokens are merged (:mod:`.inside_chunk`).
Programs end at once where no channel of the chunk needs it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fulmen.ops.linear_attention.triton.inside_chunk import collect
from fulmen.ops.linear_attention.triton.prepare import NUMBERS, any_left_out
from fulmen.triton_common.decays import channel_logs, triangle
from fulmen.triton_common.naming import named
from fulmen.triton_common.operands import Partition, chunk_place, load_row, load_rows, store_rows
from fulmen.triton_common.products import product


@triton.jit(repr=named("linear_attention_add_merged_pairs"), do_not_specialize=NUMBERS)
def add_merged_pairs(
    x, y, z, m, scores,  # Tokens, as in the walk; x and y, or the scores of prepared ones; m for the gradient
    decay, scalar, left_out,  # Tokens; of the written axis, a scalar decay beside it or None, and of its chunks
    result, gradient,  # Tokens or None: what is added to
    cu_seqlens, length, chunks, sequences, heads, scale,
    C: tl.constexpr, D: tl.constexpr, K: tl.constexpr, LEVELS: tl.constexpr, BACKWARD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    partition = Partition(cu_seqlens, length, 1, length)
    program = tl.program_id(0)
    head, number = program % heads, program // heads
    batch, t, valid = chunk_place(partition, number, chunks, sequences, C)
    chunk = number - batch * chunks
    if any_left_out(left_out, batch, chunk, head, valid, D):
        rows = tl.arange(0, C)
        if scores is None:
            pairs = tl.zeros([C, C], tl.float32)
            for channel in range(0, x.size, K):
                columns = channel + tl.arange(0, K)
                x_rows = load_rows(x, batch, t, head, rows, valid, columns)
                y_rows = load_rows(y, batch, t, head, rows, valid, columns)
                pairs += product(x_rows, tl.trans(y_rows), PRECISION)
            pairs = tl.where(triangle(rows, BACKWARD), pairs * scale, 0.0)
        else:
            pairs = load_rows(scores, batch, t, head, rows, valid, rows).to(tl.float32)
            if BACKWARD:
                pairs = tl.trans(pairs)
        for channel in range(0, z.size, K):
            columns = channel + tl.arange(0, K)
            wanted = (load_row(left_out, batch, chunk, head, columns) > 0)[None, :]
            z_rows = load_rows(z, batch, t, head, rows, valid, columns).to(tl.float32)
            logs = channel_logs(decay, batch, t, head, rows, valid, columns, scalar)
            m_rows = None
            if gradient is not None:
                m_rows = load_rows(m, batch, t, head, rows, valid, columns).to(tl.float32)
            found, of_result = collect(pairs, z_rows, m_rows, logs, rows, LEVELS, BACKWARD, PRECISION)
            if result is not None:
                add_rows(result, batch, t, head, rows, valid, columns, tl.where(wanted, found, 0.0))
            if gradient is not None:
                # A pair counts for the tokens between: at each merge, for those of the one block with what it reads of
                # the other, and for those of the other with what reads it.
                of_read = collect(tl.trans(pairs), m_rows, z_rows, logs, rows, LEVELS, not BACKWARD, PRECISION)[1]
                add_rows(gradient, batch, t, head, rows, valid, columns, tl.where(wanted, of_result + of_read, 0.0))


@triton.jit
def add_rows(x, batch, token, head, rows, valid, columns, values):
    values += load_rows(x, batch, token, head, rows, valid, columns).to(tl.float32)
    store_rows(x, batch, token, head, rows, valid, columns, values)
