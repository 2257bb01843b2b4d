"""The kernels: a sum of outer products over tokens, and rows times a matrix, either with a gate.

``ROUNDS``: what is computed enters a product as one bfloat16, as is right beside inputs that are. ``RESULT`` is what a
launch computes, for the name that a profiler shows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fulmen.triton_common.naming import named
from fulmen.triton_common.operands import load_rows, load_state, store_rows, store_state
from fulmen.triton_common.products import product


@triton.jit
def gated_rows(x, gate, sample, t, head, rows, valid, columns, ROUNDS: tl.constexpr):
    values = load_rows(x, sample, t, head, rows, valid, columns)
    if gate is not None:
        values = values.to(tl.float32) * load_rows(gate, sample, t, head, rows, valid, columns).to(tl.float32)
        values = as_factor(values, ROUNDS)
    return values


@triton.jit
def as_factor(values, ROUNDS: tl.constexpr):
    return values.to(tl.bfloat16) if ROUNDS else values


@triton.jit(
    repr=named("output_gate", lambda kernel: [kernel["RESULT"]]),
    do_not_specialize=("length", "segment_length", "segments"),  # one compilation for all lengths
)
def sum_outer(
    x, y, gate, sums, length, segment_length, segments, heads,
    C: tl.constexpr, R: tl.constexpr, W: tl.constexpr, PRECISION: tl.constexpr, ROUNDS: tl.constexpr,
    RESULT: tl.constexpr,
):  # fmt: skip
    """A tile of Σ_t x_t (y_t ⊙ gate_t)ᵀ over one segment of one head."""
    row_tiles, column_tiles = tl.cdiv(x.size, R), tl.cdiv(y.size, W)
    program = tl.program_id(0)
    row_tile, column_tile = program // column_tiles % row_tiles, program % column_tiles
    program //= row_tiles * column_tiles
    segment, head, sample = program % segments, program // segments % heads, program // (segments * heads)
    x_columns, y_columns = row_tile * R + tl.arange(0, R), column_tile * W + tl.arange(0, W)
    rows = tl.arange(0, C)
    first = segment.to(tl.int64) * segment_length
    last = tl.minimum(first + segment_length, length)
    total = tl.zeros([R, W], tl.float32)
    for step in range(tl.cdiv(last - first, C).to(tl.int32)):
        t = first + step * C
        left = load_rows(x, sample.to(tl.int64), t, head, rows, last - t, x_columns)
        right = gated_rows(y, gate, sample.to(tl.int64), t, head, rows, last - t, y_columns, ROUNDS)
        total += product(tl.trans(left), right, PRECISION)
    store_state(sums, sample, head, segment, x_columns, y_columns, x.size, y.size, total)


@triton.jit(repr=named("output_gate", lambda kernel: [kernel["RESULT"]]), do_not_specialize=("length",))
def multiply_rows(
    x, gate, factor, ungated, matrix, result, length, heads,
    C: tl.constexpr, S: tl.constexpr, R: tl.constexpr, W: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, ROUNDS: tl.constexpr, RESULT: tl.constexpr,
):  # fmt: skip
    """S chunks of C tokens and W columns of factor ⊙ ((x ⊙ gate)·matrix). ``WHOLE``: R are all channels of x, so that
    the matrix is loaded once for all chunks."""
    tiles, spans = tl.cdiv(result.size, W), tl.cdiv(length, C * S)
    program = tl.program_id(0)
    tile, span = program % tiles, program // tiles % spans
    head, sample = program // (tiles * spans) % heads, program // (tiles * spans * heads)
    rows, columns, depth = tl.arange(0, C), tile * W + tl.arange(0, W), tl.arange(0, R)
    first, place = span.to(tl.int64) * (C * S), sample.to(tl.int64)
    last = tl.minimum(first + C * S, length)
    right = None
    if WHOLE:
        right = load_state(matrix, sample, head, sample * 0, depth, columns, x.size, result.size)
        right = as_factor(right, ROUNDS)
    for chunk in range(tl.cdiv(last - first, C).to(tl.int32)):
        t = first + chunk * C
        valid = last - t
        if WHOLE:
            total = product(gated_rows(x, gate, place, t, head, rows, valid, depth, ROUNDS), right, PRECISION)
        else:
            total = tl.zeros([C, W], tl.float32)
            for step in range(tl.cdiv(x.size, R)):
                part = step * R + depth
                left = gated_rows(x, gate, place, t, head, rows, valid, part, ROUNDS)
                below = load_state(matrix, sample, head, sample * 0, part, columns, x.size, result.size)
                total += product(left, as_factor(below, ROUNDS), PRECISION)
        if ungated is not None:
            store_rows(ungated, place, t, head, rows, valid, columns, total)
        if factor is not None:
            total *= load_rows(factor, place, t, head, rows, valid, columns).to(tl.float32)
        store_rows(result, place, t, head, rows, valid, columns, total)
