"""The kernels that walk the chunks of a sequence with a state, or its gradient, in registers.

A program has a tile of W value channels and holds the transposed state Sᵀ [W, D]. So in every product of

    Yᵀ = Vᵀ Xᵀ - Sᵀ Rᵀ      Oᵀ = Sᵀ later(q)ᵀ + Uᵀ Mᵀ      Sᵀ ← w ⊙ Sᵀ + Uᵀ earlier(k)

the left factor stays in registers, where the product before has left it; the right one is loaded, and waits for
nothing. From state to state there are two products.
The walk backward in time is alike, with G the gradient of the state that leaves a chunk:

    dUᵀ = dOᵀ M + Gᵀ earlier(k)ᵀ     dVᵀ = (β dU)ᵀ X     Gᵀ ← w ⊙ Gᵀ + dOᵀ later(q) - (β dU)ᵀ R
    dβ  = row sums of Y ⊙ dV / β

dV / β is what later tokens of the chunk leave of dU. It is also dU - Lᵀ dV, but as that difference it would have the
rounding of dU, of which keys that are alike leave next to nothing. A β of 0 is none here, as in X.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fulmen.ops.delta_rule.triton.factors import product_of_errors, product_of_tokens, rounded_product
from fulmen.ops.delta_rule.triton.prepare import ENTER, LEAVE, OF_K, OF_Q, decay_words, nonzero
from fulmen.triton_common.naming import Compiled, named
from fulmen.triton_common.operands import (
    PARTITION_NUMBERS,
    Partition,
    chunk_index,
    load_column,
    load_rows,
    load_state,
    place,
    row_of,
    store_rows,
    store_state,
)
from fulmen.triton_common.products import ONE_TERM


def words(walk: Compiled) -> tuple[str, ...]:
    return "output" if walk.has("output") else "states", decay_words(walk)


@triton.jit(repr=named("delta_rule", words), do_not_specialize_on_alignment=PARTITION_NUMBERS)
def walk(
    q, k, reads,  # rows of the output, which reads the state; those that are written to it; R
    v, beta, inverse, scores, factors, totals,  # Tokens; q and scores for the output alone
    entering, leaving,  # States of the sequences, or None
    output, states, errors,  # O; or S of every chunk and Y; those that are requested
    cu_seqlens, length, segments, segment_tokens, heads,
    C: tl.constexpr, D: tl.constexpr, W: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    partition = Partition(cu_seqlens, length, segments, segment_tokens)
    tiles = tl.cdiv(v.size, W)
    program = tl.program_id(0)
    tile, head, sequence = program % tiles, program // tiles % heads, program // (tiles * heads)
    batch, start, _, stop = place(partition, sequence, sequence * 0)
    keys, values = tl.arange(0, D), tile * W + tl.arange(0, W)
    rows = tl.arange(0, C)
    state = tl.zeros([W, D], tl.float32)
    if entering is not None:
        state = load_state(entering, sequence, head, sequence * 0, values, keys, v.size, k.size)
    for step in tl.range(0, tl.cdiv(stop - start, C).to(tl.int32), disable_licm=True):
        t = start + step * C
        valid = stop - t
        k_rows = load_rows(k, batch, t, head, rows, valid, keys)
        read_rows = load_rows(reads, batch, t, head, rows, valid, keys)
        x = load_rows(inverse, batch, t, head, rows, valid, rows)
        v_rows = load_rows(v, batch, t, head, rows, valid, values)
        of_k = load_column(factors, batch, t, head, rows, valid, OF_K)
        leave = load_column(factors, batch, t, head, rows, valid, LEAVE)
        betas = load_column(beta, batch, t, head, rows, valid, 0)
        chunk = chunk_index(partition, sequence, start, t, C)

        error = product_of_errors(tl.trans(v_rows), tl.trans(x), PRECISION)
        error -= rounded_product(state, tl.trans(read_rows), PRECISION)
        written = error * betas[None, :]
        if output is not None:
            q_rows = load_rows(q, batch, t, head, rows, valid, keys)
            of_q = load_column(factors, batch, t, head, rows, valid, OF_Q)
            enter = load_column(factors, batch, t, head, rows, valid, ENTER)
            m = load_rows(scores, batch, t, head, rows, valid, rows)
            read = rounded_product(state, tl.trans(q_rows), PRECISION) * (of_q * enter)[None, :]
            read += product_of_tokens(written, tl.trans(m), PRECISION)
            store_rows(output, batch, t, head, rows, valid, values, tl.trans(read))
        if states is not None:
            store_state(states, batch, head, chunk, values, keys, v.size, k.size, state)
            store_rows(errors, batch, t, head, rows, valid, values, tl.trans(error))
        state = decayed(state, totals, batch, chunk, head, keys, DECAY)
        added = product_of_tokens(written * (of_k * leave)[None, :], k_rows, PRECISION)
        state += apart(added, valid, DECAY, PRECISION)
    if leaving is not None:
        store_state(leaving, sequence, head, sequence * 0, values, keys, v.size, k.size, state)


def words_backward(walk_backward: Compiled) -> tuple[str, ...]:
    return (decay_words(walk_backward),)


@triton.jit(repr=named("delta_rule_dv", words_backward), do_not_specialize_on_alignment=PARTITION_NUMBERS)
def walk_backward(
    q, k, reads, grad, beta, inverse, scores, factors, totals, errors,  # Tokens; grad is dO
    entering, leaving,  # gradients of the sequences' final and initial states
    grad_states, dv, dbeta,  # G of every chunk; dV; a column of dβ for each tile
    cu_seqlens, length, segments, segment_tokens, heads,
    C: tl.constexpr, D: tl.constexpr, W: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    partition = Partition(cu_seqlens, length, segments, segment_tokens)
    tiles = tl.cdiv(grad.size, W)
    program = tl.program_id(0)
    tile, head, sequence = program % tiles, program // tiles % heads, program // (tiles * heads)
    batch, start, _, stop = place(partition, sequence, sequence * 0)
    keys, values = tl.arange(0, D), tile * W + tl.arange(0, W)
    rows = tl.arange(0, C)
    state = tl.zeros([W, D], tl.float32)
    if entering is not None:
        state = load_state(entering, sequence, head, sequence * 0, values, keys, grad.size, k.size)
    steps = tl.cdiv(stop - start, C).to(tl.int32)
    for step in tl.range(0, steps, disable_licm=True):
        t = start + (steps - 1 - step) * C
        valid = stop - t
        k_rows = load_rows(k, batch, t, head, rows, valid, keys)
        read_rows = load_rows(reads, batch, t, head, rows, valid, keys)
        x = load_rows(inverse, batch, t, head, rows, valid, rows)
        m = load_rows(scores, batch, t, head, rows, valid, rows)
        grad_rows = tl.trans(load_rows(grad, batch, t, head, rows, valid, values))
        q_rows = load_rows(q, batch, t, head, rows, valid, keys)
        enter = load_column(factors, batch, t, head, rows, valid, ENTER)
        of_q = load_column(factors, batch, t, head, rows, valid, OF_Q)
        of_k = load_column(factors, batch, t, head, rows, valid, OF_K)
        leave = load_column(factors, batch, t, head, rows, valid, LEAVE)
        betas = load_column(beta, batch, t, head, rows, valid, 0)
        chunk = chunk_index(partition, sequence, start, t, C)

        du = rounded_product(state, tl.trans(k_rows), PRECISION) * (of_k * leave)[None, :]
        du += product_of_tokens(grad_rows, m, PRECISION)
        left = product_of_errors(du * nonzero(betas)[None, :], x, PRECISION) / nonzero(betas)[None, :]
        store_state(grad_states, batch, head, chunk, values, keys, grad.size, k.size, state)
        store_rows(dv, batch, t, head, rows, valid, values, tl.trans(left * betas[None, :]))
        if dbeta is not None:
            y = tl.trans(load_rows(errors, batch, t, head, rows, valid, values)).to(tl.float32)
            part = tl.sum(y * left, 0)
            tl.store(row_of(dbeta, batch, t, head) + rows * dbeta.token + tile, part, mask=rows < valid)
        state = decayed(state, totals, batch, chunk, head, keys, DECAY)
        added = rounded_product(grad_rows * (of_q * enter)[None, :], q_rows, PRECISION)
        added -= product_of_tokens(du * betas[None, :], read_rows, PRECISION)
        state += apart(added, valid, DECAY, PRECISION)
    if leaving is not None:
        store_state(leaving, sequence, head, sequence * 0, values, keys, grad.size, k.size, state)


@triton.jit
def apart(added, valid, DECAY: tl.constexpr, PRECISION: tl.constexpr):
    """What a product adds to the state. Where nothing decays, tensor cores that add to a state of float32 accuracy
    would drop what does not fit, and over thousands of tokens that adds up. The condition always holds, but the
    compiler cannot know, and has the product summed by itself."""
    return tl.where(valid > 0, added, 0.0) if DECAY == "none" and PRECISION != ONE_TERM else added


@triton.jit
def decayed(state, totals, batch, chunk, head, keys, DECAY: tl.constexpr):
    """The transposed state after all tokens of a chunk."""
    if DECAY == "channel":
        total = tl.load(row_of(totals, batch, chunk, head) + keys, mask=keys < totals.size, other=0.0)
        state *= total[None, :]
    elif DECAY != "none":
        state *= tl.load(row_of(totals, batch, chunk, head))
    return state
