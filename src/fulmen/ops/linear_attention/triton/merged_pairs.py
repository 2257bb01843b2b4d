"""What pairs of tokens give to dq, dk and the decay's gradient where every channel of the keys has a decay of its own,
in the chunks that decay too much for :mod:`.walk`, which leaves it out there. Blocks of 1, 2, 4, ... tokens are merged
(:mod:`.inside_chunk`). Programs end at once where the chunk has no need of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fulmen.ops.linear_attention.triton.inside_chunk import collect
from fulmen.ops.linear_attention.triton.prepare import NUMBERS, REACH
from fulmen.triton_common.decays import channel_logs, triangle
from fulmen.triton_common.naming import named
from fulmen.triton_common.operands import Partition, chunk_place, load_rows, row_of, store_rows
from fulmen.triton_common.products import product


@triton.jit(repr=named("linear_attention_add_merged_pairs"), do_not_specialize=NUMBERS)
def add_merged_pairs(
    q, k, v, do, decay, reach,  # Tokens
    dq, dk, gradient,  # Tokens or None: what is added to; dq and the gradient, or dk and the gradient, or one
    cu_seqlens, length, chunks, sequences, heads, scale,
    C: tl.constexpr, K: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    partition = Partition(cu_seqlens, length, 1, length)
    program = tl.program_id(0)
    head, number = program % heads, program // heads
    batch, t, valid = chunk_place(partition, number, chunks, sequences, C)
    reached = tl.load(row_of(reach, batch, number - batch * chunks, head), mask=valid > 0, other=0.0)
    if reached > REACH:
        rows = tl.arange(0, C)
        pairs = tl.zeros([C, C], tl.float32)
        for channel in range(0, v.size, K):
            columns = channel + tl.arange(0, K)
            do_rows = load_rows(do, batch, t, head, rows, valid, columns)
            v_rows = load_rows(v, batch, t, head, rows, valid, columns)
            pairs += product(do_rows, tl.trans(v_rows), PRECISION)
        pairs = tl.where(triangle(rows, False), pairs * scale, 0.0)
        for channel in range(0, k.size, K):
            columns = channel + tl.arange(0, K)
            q_rows = load_rows(q, batch, t, head, rows, valid, columns).to(tl.float32)
            k_rows = load_rows(k, batch, t, head, rows, valid, columns).to(tl.float32)
            logs = channel_logs(decay, batch, t, head, rows, valid, columns)
            # A pair counts for the tokens between: at each merge, those of the later block with dq, the others with dk.
            to_q, later = collect(pairs, k_rows, q_rows, logs, rows, LEVELS, False, PRECISION)
            to_k, earlier = collect(tl.trans(pairs), q_rows, k_rows, logs, rows, LEVELS, True, PRECISION)
            if dq is not None:
                add_rows(dq, batch, t, head, rows, valid, columns, to_q)
            if dk is not None:
                add_rows(dk, batch, t, head, rows, valid, columns, to_k)
            if gradient is not None:
                add_rows(gradient, batch, t, head, rows, valid, columns, later + earlier)


@triton.jit
def add_rows(x, batch, token, head, rows, valid, columns, values):
    values += load_rows(x, batch, token, head, rows, valid, columns).to(tl.float32)
    store_rows(x, batch, token, head, rows, valid, columns, values)
