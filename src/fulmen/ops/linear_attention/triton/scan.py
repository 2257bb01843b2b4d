"""The kernel that walks the chunks of a segment. All of linear attention, forward and backward, is this one walk.

    S ← e^total ⊙ S + Σ_j (w_j ⊙ y_j) z_jᵀ           the state [R, W], over the chunks of the segment
    r_i = (w_i ⊙ x_i) S + Σ_j w_ij (x_i · y_j) z_j   what the tokens of a chunk get, from the state before it

Forward in time with (x, y, z) = (q, k, v) it is the output, and with (do, v, k), the two axes exchanged, dq. Backward
in time with (v, do, q) it is dk, and with (k, q, do) dv; S is then the gradient of the state. Where the read axis is
in slices (:mod:`~fulmen.ops.linear_attention.triton.tiles`), x and y are [slices, C, R / slices], the state is
[slices, R / slices, W].

The gradient of a decay of the written axis is collected on the way, from sums that do not cancel (docs, section 4). It
needs the walks in both directions: (do, v, k) and (v, do, q) for the key axis, (q, k, v) and (k, q, do) for the value
axis, with m the factor of r in the loss, which is q, k, do and v. A pair of tokens counts for every token between:

    i and j in one chunk                    the forward walk, or at each boundary the one that holds the token's side
    i in the chunk, j before or after it    Σ m_i ⊙ r_i over the tokens i from which t is on the way to the boundary
    neither in it                           crossing = e^total ⊙ S_before ⊙ dS_after, summed over the read axis

Crossing would need both states at once. But held = S ⊙ dS, so summed, at the boundary of two chunks is crossing plus
what the one chunk adds: held_before = crossing + given, held_after = crossing + taken. Σ m_i ⊙ r_i over the chunk, with
what came from the state, is given in the forward walk, which stores it, and taken in the backward walk, which starts
from held at the end of its segment. That subtracts, but in float32 and only what belongs to one boundary: where a chunk
leaves less of the state than float32 resolves beside what it adds, crossing is 0 and the walk starts again, and
elsewhere the error is that of a few float32 sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fulmen.ops.linear_attention.triton.inside_chunk import collect, contribution, scalar_gradient, scores
from fulmen.ops.linear_attention.triton.naming import decays
from fulmen.triton_common.decays import (
    channel_logs,
    channel_weights,
    decayed,
    entering_mask,
    pair_weights,
    remaining,
    scalar_logs,
    scalar_weights,
    triangle,
    weigh,
)
from fulmen.triton_common.naming import Compiled, named
from fulmen.triton_common.operands import (
    PARTITION_NUMBERS,
    Partition,
    chunk_index,
    load_rows,
    load_state,
    place,
    row_of,
    slices,
    store_rows,
    store_state,
    zero_state,
)
from fulmen.triton_common.products import THREE_TERMS, TWO_TERMS, product, sum_slices, sum_where

NOTHING = tl.constexpr(2.0**-24)  # beside 1, in float32


def words(scan: Compiled) -> tuple[str, ...]:
    read, write = scan.has("read_decay"), scan.has("write_decay")
    key, value = (read, write) if scan["WALK"] in ("output", "dv") else (write, read)
    form = decays(scan.has("decay") and not scan["PER_TOKEN"], scan["PER_TOKEN"], key, value)
    return scan["WALK"], form, "and_gradient" if scan.has("m") else ""


@triton.jit(
    repr=named("linear_attention", words),
    do_not_specialize=("starts_empty",),
    do_not_specialize_on_alignment=PARTITION_NUMBERS,
)
def scan(
    x, y, z, result,  # Tokens; without y and z, only the states that enter the segments are read
    decay, read_decay, write_decay,  # the scalar decay, and those of the channels of either axis; Tokens or None
    entering, leaving,  # States by boundary; None: zeros enter, what leaves is not stored
    m, decay_grad, given, boundaries,  # for the gradient of the written axis' decay; boundaries: of S, where S is dS
    starts_empty,  # 1 where no state enters the sequences, else 0
    cu_seqlens, length, segments, segment_tokens, heads, write_size, scale,
    C: tl.constexpr, R: tl.constexpr, S: tl.constexpr, W: tl.constexpr, LEVELS: tl.constexpr,
    PER_TOKEN: tl.constexpr, WALK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    partition = Partition(cu_seqlens, length, segments, segment_tokens)
    tiles = tl.cdiv(write_size, W)
    program = tl.program_id(0)
    tile, head = program % tiles, program // tiles % heads
    segment, sequence = program // (tiles * heads) % partition.segments, program // (tiles * heads * partition.segments)
    batch, start, first, last = place(partition, sequence, segment)
    reads, writes = slices(R, S), tile * W + tl.arange(0, W)
    before, after = segment, segment + 1
    # The gradient of a decay needs three terms where its sums are subtracted: in what goes through the state. What is
    # inside the chunk is only added, and with decays per channel there would be no registers for a third term.
    PER_CHANNEL: tl.constexpr = read_decay is not None or write_decay is not None
    INSIDE: tl.constexpr = TWO_TERMS if PER_CHANNEL and PRECISION == THREE_TERMS else PRECISION
    BACKWARD: tl.constexpr = WALK == "dk" or WALK == "dv"  # in time
    if BACKWARD:
        before, after = segment + 1, segment

    state = zero_state(R, S, W)
    if entering is not None:
        state = load_state(entering, sequence, head, before, reads, writes, x.size, write_size)
    if m is not None:
        # Gradients of a scalar decay have one column for each tile, to be added up.
        CHANNEL: tl.constexpr = write_decay is not None
        PER_HEAD: tl.constexpr = write_decay is None and not PER_TOKEN
        columns = tile + tl.arange(0, 1)
        if CHANNEL:
            columns = writes
        of_head = tl.zeros([1], tl.float32)
        held = tl.zeros([W if CHANNEL else 1], tl.float32)
        if BACKWARD:
            other = load_state(boundaries, sequence, head, before, reads, writes, x.size, write_size)
            held = sum_rows(sum_slices(state * other), CHANNEL)

    steps = tl.cdiv(last - first, C).to(tl.int32)
    # What is the same for all chunks (masks, addresses) is computed for each: kept in registers, it made kernels spill.
    for step in tl.range(0, steps, disable_licm=True):
        t = first + step * C
        if BACKWARD:
            t = first + (steps - 1 - step) * C
        valid = last - t
        # From 0 to C - 1; what is added is always 0, but the compiler cannot know and so leaves the masks in the loop.
        rows = tl.arange(0, C) + (valid < 1).to(tl.int32)
        x_rows = load_rows(x, batch, t, head, rows, valid, reads)

        # The logarithms of the chunk's decays, and the weights of its rows up to the boundary where the state enters.
        enter, leave = entering_mask(rows, BACKWARD), entering_mask(rows, not BACKWARD)
        logs, read_logs, write_logs, x_weights, weights = None, None, None, None, None
        if decay is not None:
            logs = scalar_logs(decay, batch, t, head, rows, valid, PER_TOKEN)
            weights = scalar_weights(logs, enter)[:, None]
        if read_decay is not None:
            read_logs = channel_logs(read_decay, batch, t, head, rows, valid, reads)
            x_weights = channel_weights(read_logs, enter)
        if write_decay is not None:
            write_logs = channel_logs(write_decay, batch, t, head, rows, valid, writes)
            weights = weigh(channel_weights(write_logs, enter), weights)

        # What the state gives to the tokens.
        values = weigh(sum_slices(product(weigh(x_rows, x_weights), state, PRECISION)), weights)
        if m is not None:
            m_rows = load_rows(m, batch, t, head, rows, valid, writes)
            gradient = sum_on_the_way(m_rows * values, tl.trans(enter), CHANNEL)
            exchanged = sum_rows(m_rows * values, CHANNEL)

        # What the tokens leave of the state and add to it, and what they give to each other.
        state = decayed(state, logs, read_logs, write_logs)
        if y is not None:
            y_rows = load_rows(y, batch, t, head, rows, valid, reads)
            z_rows = load_rows(z, batch, t, head, rows, valid, writes)
            added = contribution(y_rows, z_rows, logs, read_logs, write_logs, leave, PRECISION)
            pairs = scores(x_rows, y_rows, read_logs, rows, LEVELS, BACKWARD, INSIDE)
            if decay is not None:
                pairs *= pair_weights(logs, rows, PER_TOKEN, BACKWARD)
            pairs = tl.where(triangle(rows, BACKWARD), pairs, 0.0)
            if BACKWARD:
                added *= scale
                pairs *= scale
            elif decay is None and not PER_CHANNEL:
                # The condition always holds, but the compiler cannot know. It would otherwise let the product add to
                # the state, and tensor cores drop what does not fit: over 32768 tokens that adds up to 1e-4.
                added = tl.where(valid > 0, added, 0.0)
            state += added
            if m is None:
                values += collect(pairs, z_rows, None, write_logs, rows, LEVELS, BACKWARD, INSIDE)[0]
            else:
                inside, of_pairs = collect(pairs, z_rows, m_rows, write_logs, rows, LEVELS, BACKWARD, INSIDE)
                values += inside
                if CHANNEL:
                    gradient += of_pairs
                elif not BACKWARD:
                    gradient += scalar_gradient(pairs, m_rows, z_rows, rows, PRECISION)[:, None]
        if not BACKWARD:
            values *= scale
        if result is not None:
            store_rows(result, batch, t, head, rows, valid, writes, values)

        if m is not None:
            if BACKWARD:
                # Nothing crosses the first chunk of a sequence that starts empty. This is not left to a difference, so
                # that the gradient is an exact 0 where no pair exists.
                crosses = (remaining(logs, write_logs) > NOTHING) & ((t > start) | (starts_empty == 0))
                held = tl.where(crosses, held - exchanged, 0.0)
                gradient += held[None, :]  # here it is what crosses the chunk
            else:
                gradient *= scale
            if PER_HEAD:
                of_head += tl.sum(tl.where((rows < valid)[:, None], gradient, 0.0), 0)
                if y is not None:
                    chunk = row_of(given, batch, chunk_index(partition, sequence, start, t, C), head) + columns
                    if BACKWARD:
                        held += tl.load(chunk)
                    else:
                        tl.store(chunk, exchanged * scale)
            else:
                if BACKWARD and y is not None:
                    forward = load_rows(decay_grad, batch, t, head, rows, valid, columns)
                    gradient += forward
                    # All tokens of the chunk counted for its first one: there stands what the forward walk gave.
                    held += tl.sum(tl.where((rows == 0)[:, None], forward, 0.0), 0)
                if not CHANNEL:
                    tl.debug_barrier()  # all warps have read the one column that one of them overwrites
                store_rows(decay_grad, batch, t, head, rows, valid, columns, gradient)

    if leaving is not None:
        store_state(leaving, sequence, head, after, reads, writes, x.size, write_size, state)
    if m is not None and PER_HEAD:
        total = row_of(decay_grad, sequence.to(tl.int64), segment, head) + columns
        if BACKWARD and y is not None:
            of_head += tl.load(total)
        tl.store(total, of_head)


@triton.jit
def sum_rows(x, CHANNEL: tl.constexpr):
    """Over the rows of ``[.., W]``, and without a decay per channel over all: ``[W]`` or ``[1]``."""
    total = tl.sum(x, 0)
    return total if CHANNEL else tl.sum(total[None, :], 1)


@triton.jit
def sum_on_the_way(x, mask, CHANNEL: tl.constexpr):
    """``[C, W]`` or, without a decay per channel, ``[C, 1]``: the sum over the masked tokens of ``x`` ``[C, W]``."""
    return sum_where(mask, x) if CHANNEL else tl.sum(tl.where(mask, tl.sum(x, 1)[None, :], 0.0), 1)[:, None]
