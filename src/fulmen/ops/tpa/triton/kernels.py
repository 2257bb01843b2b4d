"""The kernels: softmax over some of the tokens for a tile of heads, and the merge of several such results.

    scores = (aq (bq bkᵀ)) ⊙ ak        heads × tokens
    o      = softmax(scores) ⊙ av · bv

A rank of ak or av is one number for each token and head, a rank of bk or bv one row for each token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fulmen.triton_common.naming import named
from fulmen.triton_common.operands import load_rows, row_of
from fulmen.triton_common.products import THREE_TERMS, TWO_TERMS, product

INFINITY = tl.constexpr(float("inf"))


@triton.jit(
    repr=named("tpa_decode", lambda decode: ["slice" if decode.has("maxima") else ""]),
    do_not_specialize=("tokens", "slices", "slice_tokens"),  # they grow as tokens are decoded
)
def decode(
    aq, ak, av, bq, bk, bv, output, maxima, sums, seqlens,
    tokens, slices, slice_tokens, heads, rank, key_rank, value_rank, scale,
    H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, C: tl.constexpr,
    FORMS_Q: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """One slice of tokens of one sample and H heads. ``output`` is [B, slices, heads, E]: with ``maxima`` and ``sums``
    [B, slices, heads] a partial result, without them the result itself."""
    tiles = tl.cdiv(heads, H)
    program = tl.program_id(0)
    tile, part, sample = program % tiles, program // tiles % slices, program // (tiles * slices)
    batch = sample.to(tl.int64)
    first_head = tile * H
    lanes, keys, values, rows = tl.arange(0, H), tl.arange(0, D), tl.arange(0, E), tl.arange(0, C)
    ranks = tl.arange(0, R)
    of_head = first_head + lanes
    length = length_of(seqlens, batch, tokens)
    first = part.to(tl.int64) * slice_tokens
    last = tl.minimum(length, first + slice_tokens)
    SCORES: tl.constexpr = THREE_TERMS if SINGLE is None else SINGLE
    VALUES: tl.constexpr = TWO_TERMS if SINGLE is None else SINGLE

    # The query: its two factors, or for many ranks itself.
    if FORMS_Q:
        query = tl.zeros([H, D], tl.float32)
        for r in range(0, rank, R):
            a = load_ranks(aq, batch, of_head, r + ranks, heads)
            query += product(a, load_ranks(bq, batch, r + ranks, keys, rank), SCORES)
        mix = None
    else:
        mix = load_ranks(aq, batch, of_head, ranks, heads)
        query = load_ranks(bq, batch, ranks, keys, rank)

    maximum = tl.full([H], -INFINITY, tl.float32)
    total = tl.zeros([H], tl.float32)
    result = tl.zeros([H, E], tl.float32)
    for step in range(0, tl.cdiv(last - first, C).to(tl.int32)):
        t = first + step * C
        valid = (last - t).to(tl.int32)
        scores = tl.zeros([H, C], tl.float32)
        for r in range(0, key_rank):
            key = tl.trans(load_rows(bk, batch, t, r, rows, valid, keys))
            term = product(query, key, SCORES)
            if not FORMS_Q:
                term = product(mix, term, SCORES)
            scores += term * load_heads(ak, batch, t, r, of_head, rows, valid, heads).to(tl.float32)
        # Padding is masked in the exponent.
        scores = tl.where((rows < valid)[None, :], scores * scale, -INFINITY)
        larger = tl.maximum(maximum, tl.max(scores, 1))
        origin = tl.where(larger == -INFINITY, 0.0, larger)
        weights = tl.exp(scores - origin[:, None])
        kept = tl.exp(maximum - origin)
        total = total * kept + tl.sum(weights, 1)
        result *= kept[:, None]
        for r in range(0, value_rank):
            weighed = weights * load_heads(av, batch, t, r, of_head, rows, valid, heads).to(tl.float32)
            value = load_rows(bv, batch, t, r, rows, valid, values)
            result += product(weighed, value, VALUES)
        maximum = larger

    if maxima is None:
        result /= tl.where(length > 0, total * value_rank, 1.0)[:, None]
    else:
        place = (batch * slices + part) * heads + of_head
        tl.store(maxima + place, maximum, mask=of_head < heads)
        tl.store(sums + place, total, mask=of_head < heads)
    into = row_of(output, batch, part, program * 0) + of_head[:, None] * output.head + values[None, :]
    mask = (of_head < heads)[:, None] & (values < output.size)[None, :]
    tl.store(into, result.to(output.pointer.dtype.element_ty), mask=mask)


@triton.jit(repr=named("tpa_merge"), do_not_specialize=("tokens", "slices"))
def merge(partial, maxima, sums, output, seqlens, tokens, slices, heads, value_rank, E: tl.constexpr):
    """The slices of one sample and head, in order."""
    program = tl.program_id(0)
    head, sample = program % heads, program // heads
    batch = sample.to(tl.int64)
    length = length_of(seqlens, batch, tokens)
    values = tl.arange(0, E)
    inside = values < output.size
    maximum = tl.full([1], -INFINITY, tl.float32)
    total = tl.zeros([1], tl.float32)
    result = tl.zeros([E], tl.float32)
    for part in range(0, slices):
        place = (batch * slices + part) * heads + head + tl.arange(0, 1)
        other = tl.load(maxima + place)
        larger = tl.maximum(maximum, other)
        origin = tl.where(larger == -INFINITY, 0.0, larger)
        kept, added = tl.exp(maximum - origin), tl.exp(other - origin)
        total = total * kept + tl.load(sums + place) * added
        row = tl.load(row_of(partial, batch, part, head) + values, mask=inside, other=0.0)
        result = result * kept + row * added
        maximum = larger
    result /= tl.where(length > 0, total * value_rank, 1.0)
    into = row_of(output, batch, program * 0, head) + values
    tl.store(into, result.to(output.pointer.dtype.element_ty), mask=inside)


@triton.jit
def length_of(seqlens, batch, tokens):
    """Tokens of a sample, of which there are not more than ``tokens`` whatever seqlens says."""
    length = batch * 0 + tokens
    return length if seqlens is None else tl.minimum(tl.load(seqlens + batch).to(tl.int64), length)


@triton.jit
def load_ranks(x, batch, rows, columns, row_count):
    """``[rows, columns]`` of one sample of aq (heads, ranks) or bq (ranks, channels); zeros outside."""
    pointers = x.pointer + batch * x.batch + rows[:, None] * x.head + columns[None, :]
    return tl.load(pointers, mask=(rows < row_count)[:, None] & (columns < x.size)[None, :], other=0.0)


@triton.jit
def load_heads(x, batch, token, rank, of_head, rows, valid, heads):
    """One rank of ak or av as ``[H, C]``: a number for each head and token; zeros outside."""
    base = x.pointer + batch * x.batch + token * x.token + rank
    pointers = base + of_head[:, None] * x.head + rows[None, :] * x.token
    return tl.load(pointers, mask=(of_head < heads)[:, None] & (rows < valid)[None, :], other=0.0)
