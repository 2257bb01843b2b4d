"""Token by token: decoding, and the "recurrent" schedule."""

from __future__ import annotations

import triton
import triton.language as tl

from fulmen.ops.delta_rule.triton.prepare import EPSILON, decay_words
from fulmen.triton_common.naming import Compiled, named
from fulmen.triton_common.operands import (
    PARTITION_NUMBERS,
    Partition,
    load_row,
    load_state,
    place,
    row_of,
    store_state,
)


def words(recur: Compiled) -> tuple[str, ...]:
    return (decay_words(recur),)


@triton.jit(repr=named("delta_rule_recur", words), do_not_specialize_on_alignment=PARTITION_NUMBERS)
def recur(
    q, k, v, beta, decay, output, entering, leaving,
    cu_seqlens, length, segments, segment_tokens, heads, scale,
    D: tl.constexpr, W: tl.constexpr, DECAY: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """S ← e^a ⊙ S, then S ← S + k (β (v - Sᵀ k))ᵀ and o = scale · qᵀ S for each token; a program has all of D and a
    tile of E."""
    partition = Partition(cu_seqlens, length, segments, segment_tokens)
    tiles = tl.cdiv(v.size, W)
    program = tl.program_id(0)
    tile, head, sequence = program % tiles, program // tiles % heads, program // (tiles * heads)
    batch, first, _, last = place(partition, sequence, sequence * 0)
    keys, values = tl.arange(0, D), tile * W + tl.arange(0, W)
    state = tl.zeros([D, W], tl.float32)
    if entering is not None:
        state = load_state(entering, sequence, head, sequence * 0, keys, values, q.size, v.size)
    for step in range(0, (last - first).to(tl.int32)):
        t = first + step
        q_row, k_row = load_row(q, batch, t, head, keys), load_row(k, batch, t, head, keys)
        if NORMALIZE:
            q_row *= tl.rsqrt(tl.sum(q_row * q_row) + EPSILON)
            k_row *= tl.rsqrt(tl.sum(k_row * k_row) + EPSILON)
        if DECAY == "channel":
            state *= tl.exp(load_row(decay, batch, t, head, keys))[:, None]
        elif DECAY == "token":
            state *= tl.exp(tl.load(row_of(decay, batch, t, head)).to(tl.float32))
        elif DECAY == "head":
            state *= tl.exp(tl.load(decay.pointer + head).to(tl.float32))
        known = tl.sum(k_row[:, None] * state, 0)
        of_token = tl.load(row_of(beta, batch, t, head)).to(tl.float32)
        written = of_token * (load_row(v, batch, t, head, values) - known)
        state += k_row[:, None] * written[None, :]
        read = scale * tl.sum(q_row[:, None] * state, 0)
        into = row_of(output, batch, t, head) + values
        tl.store(into, read.to(output.pointer.dtype.element_ty), mask=values < v.size)
    if leaving is not None:
        store_state(leaving, sequence, head, sequence * 0, keys, values, q.size, v.size, state)
