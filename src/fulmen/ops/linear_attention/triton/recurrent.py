"""Token by token: decoding, and the "recurrent" schedule."""

from __future__ import annotations

import triton
import triton.language as tl

from fulmen.ops.linear_attention.triton.naming import decays
from fulmen.triton_common.naming import Compiled, named
from fulmen.triton_common.operands import PARTITION_NUMBERS, Partition, load_state, place, row_of, store_state


def words(recur: Compiled) -> tuple[str, ...]:
    head = recur.has("decay") and not recur["PER_TOKEN"] and not recur["PER_CHANNEL"]
    return (decays(head, recur["PER_TOKEN"], recur["PER_CHANNEL"], recur.has("decay_v")),)


@triton.jit(repr=named("linear_attention_recur", words), do_not_specialize_on_alignment=PARTITION_NUMBERS)
def recur(
    q, k, v, decay, decay_v, result, entering, leaving,
    cu_seqlens, length, segments, segment_tokens, heads, scale,
    D: tl.constexpr, E: tl.constexpr, PER_TOKEN: tl.constexpr, PER_CHANNEL: tl.constexpr,
):  # fmt: skip
    """S ← e^a ⊙ S ⊙ e^c + k vᵀ and o = scale · qᵀ S for each token; a program has all of D and a tile of E."""
    partition = Partition(cu_seqlens, length, segments, segment_tokens)
    tiles = tl.cdiv(v.size, E)
    program = tl.program_id(0)
    tile, head, sequence = program % tiles, program // tiles % heads, program // (tiles * heads)
    batch, _, first, last = place(partition, sequence, sequence * 0)
    keys, values = tl.arange(0, D), tile * E + tl.arange(0, E)
    state = tl.zeros([D, E], tl.float32)
    if entering is not None:
        state = load_state(entering, sequence, head, sequence * 0, keys, values, q.size, v.size)
    for step in range(0, (last - first).to(tl.int32)):
        t = first + step
        if decay is not None:
            if PER_CHANNEL:
                state *= tl.exp(load_row(decay, batch, t, head, keys))[:, None]
            elif PER_TOKEN:
                state *= tl.exp(tl.load(row_of(decay, batch, t, head)).to(tl.float32))
            else:
                state *= tl.exp(tl.load(decay.pointer + head).to(tl.float32))
        if decay_v is not None:
            state *= tl.exp(load_row(decay_v, batch, t, head, values))[None, :]
        state += load_row(k, batch, t, head, keys)[:, None] * load_row(v, batch, t, head, values)[None, :]
        output = scale * tl.sum(load_row(q, batch, t, head, keys)[:, None] * state, 0)
        into = row_of(result, batch, t, head) + values
        tl.store(into, output.to(result.pointer.dtype.element_ty), mask=values < v.size)
    if leaving is not None:
        store_state(leaving, sequence, head, sequence * 0, keys, values, q.size, v.size, state)


@triton.jit
def load_row(x, batch, token, head, columns):
    """One token's ``[K]`` in float32; zeros beyond the end."""
    return tl.load(row_of(x, batch, token, head) + columns, mask=columns < x.size, other=0.0).to(tl.float32)
