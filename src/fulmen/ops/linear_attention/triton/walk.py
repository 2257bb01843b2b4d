"""The kernel that walks the chunks of a segment. All of linear attention, forward and backward, is this one walk.

    S ← e^total S + Σ_j e^leave_j y_j z_jᵀ             the state [R, W], over the chunks of the segment
    r_i = e^enter_i x_i S + Σ_j e^between_ij (x_i · y_j) z_j     what the tokens of a chunk get

Forward in time with (x, y, z) = (q, k, v) it is the output, and with (do, v, k), the two axes exchanged, dq. Backward
in time with (v, do, q) it is dk, and with (k, q, do) dv; S is then the gradient of the state. Without x it is what a
segment adds to the state, and without y and z what the entering state alone gives.

How it is written is what the cost model asks for (docs/gpu.md): all loads stand at the top of the loop, so that the
next chunk's are under way while this one is worked on; the scale goes into weights that are there anyway; and
``MIRRORED`` computes the transpose of everything. The state is then the left factor of its product with the rows, which
on NVIDIA's before Hopper stays in registers, where the right one goes through shared memory.

Where the channels of an axis decay each by itself, e^total is a number for each channel of the state. An axis that is
read was prepared (:mod:`.prepare`): e^enter and e^leave are in the rows x and y, and the pairs e^between_ij (x_i · y_j)
are there already. Without pairs, in walks that have no x or no y, the rows are weighed here. On the axis that is
written, enter and leave are found here for each channel, and

    Σ_j e^between_ij (x_i · y_j) z_j = e^(enter_i - total) ⊙ Σ_j (x_i · y_j) (e^leave_j ⊙ z_j)

whose last factor is in the state's sum anyway. That holds for channels that do not reach too far (:mod:`.prepare`); of
others this sum is left out, and :mod:`.merged_pairs` adds it. A scalar decay of the keys beside one of the values'
channels is added to theirs.

Gradients of decays (:mod:`.decay_gradients`) are sums of pairs on both sides of a token's decay. Where the walk has m,
the factor of its results in the loss, it leaves what they are made of:

- A decay per head: walking dq with m = q, a second state of the same sums counts for each pair the decays between its
  tokens, which is the derivative of its weight. So the gradient is a sum of pairs: of those in the segment, and at its
  end of the counted state with the gradient of the state there. Nothing is taken away again.
- A decay per token: walking dq with m = q and dk with m = k, the sums m_i · r_i of each token, without the pair of the
  token with itself, which does not decay; and walking backward in time Σ S ⊙ dS at the end of the segment.
- A decay per channel of the written axis: walking forward in time (dq, or the output with m = do) m_i ⊙ r_i, and
  backward in time (dk, or dv with m = v) the gradient in their place (:func:`channel_gradient`).
- Where tokens have an effect through the states at boundaries alone (there is no y): m_i · r_i, or m_i ⊙ r_i, in the
  place of the next token, and Σ S ⊙ dS of what crosses the whole segment (:func:`~.decay_sums.sum_before`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fulmen.ops.linear_attention.triton.decay_sums import LOG_NOTHING
from fulmen.ops.linear_attention.triton.naming import decays
from fulmen.triton_common.decays import channel_logs, exponents, weigh
from fulmen.triton_common.mirrored import (
    by_column,
    by_row,
    load_oriented_state,
    oriented,
    store_oriented_state,
    sum_columns,
    sum_rows,
    times,
)
from fulmen.triton_common.naming import Compiled, named
from fulmen.triton_common.operands import (
    PARTITION_NUMBERS,
    Partition,
    chunk_index,
    load_row,
    load_rows,
    place,
    row_of,
    store_rows,
)
from fulmen.triton_common.products import ONE_TERM, THREE_TERMS

NOTHING = tl.constexpr(2.0**-24)  # beside 1, in float32
SMALLEST = tl.constexpr(2.0**-126)


def words(walk: Compiled) -> tuple[str, ...]:
    read, write = walk.has("totals") or walk.has("read_decay"), walk.has("write_decay")
    key, value = (read, write) if walk["WRITES"] == "value" else (write, read)
    scalar = walk.has("decay") and not walk["PER_TOKEN"]
    form = decays(scalar, walk["PER_TOKEN"], key, value)
    return walk["WALK"], form, "and_gradient" if walk.has("m") else ""


@triton.jit(
    repr=named("linear_attention", words),
    do_not_specialize=("first_segment", "walked", "starts_empty"),
    do_not_specialize_on_alignment=PARTITION_NUMBERS,
)
def walk(
    x, y, z, result,  # Tokens or None
    decay,  # Tokens or None: of all channels
    read_decay, write_decay,  # Tokens or None: of each channel that is read and was not prepared, or written
    scores, totals,  # Tokens or None, prepared: pairs, what chunks leave of each channel that is read
    write_totals, left_out,  # Tokens or None: the same of those that are written, and whether their pairs are left out
    entering, leaving,  # States by boundary; None: zeros enter, what leaves is not stored
    m, sums, crossing,  # for the gradient of the decay
    boundaries,  # and the gradients of the states there; where S is a gradient, the states; None: zeros
    first_segment, walked,  # the segments of this launch
    starts_empty,  # 1 where no state enters the sequences, else 0
    cu_seqlens, length, segments, segment_tokens, heads, read_size, write_size, scale,
    C: tl.constexpr, R: tl.constexpr, W: tl.constexpr, MIRRORED: tl.constexpr, WHOLE: tl.constexpr,
    PER_TOKEN: tl.constexpr, WALK: tl.constexpr, WRITES: tl.constexpr, CARRY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``CARRY``: a program has all segments of its sequence, and leaves the state at each of their boundaries."""
    partition = Partition(cu_seqlens, length, segments, segment_tokens)
    tiles = tl.cdiv(write_size, W)
    program = tl.program_id(0)
    tile, head = program % tiles, program // tiles % heads
    segment, sequence = first_segment + program // (tiles * heads) % walked, program // (tiles * heads * walked)
    batch, start, first, last = place(partition, sequence, segment)
    reads, writes = tl.arange(0, R), tile * W + tl.arange(0, W)
    BACKWARD: tl.constexpr = WALK == "dk" or WALK == "dv" or WALK == "summary_backward"  # in time
    # What a token gives to itself is no part of the decay's gradient, and need be no better than the other results.
    OWN: tl.constexpr = ONE_TERM if z is not None and z.pointer.dtype.element_ty == tl.bfloat16 else PRECISION
    # States of float16 inputs are as good as those of float32: two terms of what is added are off by 2^-17.
    ADDED: tl.constexpr = THREE_TERMS if z is not None and z.pointer.dtype.element_ty == tl.float16 else PRECISION
    # Whether there is the second state, that counts decays.
    COUNTS: tl.constexpr = m is not None and y is not None and write_decay is None and not PER_TOKEN
    SHIFT: tl.constexpr = 1 if y is None else 0  # of where a token's sums are stored
    before, after = segment, segment + 1
    if BACKWARD:
        before, after = segment + 1, segment

    state = tl.zeros([W, R] if MIRRORED else [R, W], tl.float32)
    if entering is not None:
        state = load_oriented_state(
            entering, sequence, head, before, reads, writes, read_size, write_size, MIRRORED
        )  # fmt: skip
    if COUNTS:
        counted, found = tl.zeros_like(state), tl.zeros([W, C] if MIRRORED else [C, W], tl.float32)
        found_inside = tl.zeros([C, C], tl.float32)
    elif boundaries is not None and y is not None:
        other = load_oriented_state(
            boundaries, sequence, head, before, reads, writes, read_size, write_size, MIRRORED
        )  # fmt: skip
        if write_decay is None:
            tl.store(row_of(crossing, sequence.to(tl.int64), segment, head * tiles + tile), tl.sum(state * other))
        else:
            held = sum_rows(state * other, MIRRORED)

    steps, in_segment = tl.cdiv(last - first, C).to(tl.int32), tl.cdiv(segment_tokens, C)
    if CARRY:
        steps = (segments - 1) * in_segment + tl.cdiv(length - (segments - 1) * segment_tokens, C)
    # Masks and addresses are computed for each chunk: kept in registers from chunk to chunk they cost more.
    for step in tl.range(0, steps, disable_licm=True):
        t = first + step * C
        if BACKWARD:
            t = first + (steps - 1 - step) * C
        end = last
        if CARRY:
            carried_to = step // in_segment + 1
            t = first + (carried_to - 1) * segment_tokens + step % in_segment * C
            end = tl.minimum(first + carried_to * segment_tokens, length)
        valid = (end - t).to(tl.int32)
        # From 0 to C - 1; what is added is always 0, but the compiler cannot know and so leaves the masks in the loop.
        rows = tl.arange(0, C) + (valid < 1).to(tl.int32)
        if x is not None:
            x_rows = oriented(load_rows(x, batch, t, head, rows, valid, reads, WHOLE), MIRRORED)
        if y is not None:
            y_rows = oriented(load_rows(y, batch, t, head, rows, valid, reads, WHOLE), MIRRORED)
            z_rows = oriented(load_rows(z, batch, t, head, rows, valid, writes, WHOLE), MIRRORED)
        if m is not None:
            m_rows = oriented(load_rows(m, batch, t, head, rows, valid, writes, WHOLE), MIRRORED)
        if scores is not None:
            # A row of them has what its token reads; backward in time, what reads it. Loaded as its transpose, not
            # transposed: on Ampere the compiler else gives the state two layouts, and moves it between them.
            TRANSPOSED: tl.constexpr = MIRRORED != BACKWARD
            of_row, of_column = by_row(rows, TRANSPOSED), by_column(rows, TRANSPOSED)
            pointers = row_of(scores, batch, t, head) + of_row * scores.token + of_column
            pairs = tl.load(pointers, mask=of_row < valid, other=0.0)
        if totals is not None:
            chunk = chunk_index(partition, sequence, start, t, C)
            read_left = load_row(totals, batch, chunk, head, reads)
        if read_decay is not None:
            scalar = decay if write_decay is None else None
            read_logs = oriented(channel_logs(read_decay, batch, t, head, rows, valid, reads, scalar), MIRRORED)
        if write_decay is not None:
            logs = oriented(channel_logs(write_decay, batch, t, head, rows, valid, writes, decay), MIRRORED)
            if write_totals is not None:
                chunk = chunk_index(partition, sequence, start, t, C)
                left = load_row(write_totals, batch, chunk, head, writes)
                too_far = load_row(left_out, batch, chunk, head, writes) > 0
            if m is not None and BACKWARD and y is not None:
                forward = oriented(load_rows(sums, batch, t, head, rows, valid, writes, WHOLE), MIRRORED)
        i, j = by_row(rows, MIRRORED), by_column(rows, MIRRORED)

        # Weights: of tokens, from where the state enters and to where it leaves the chunk; of pairs, and of their sums.
        enter, leave, of_pairs, of_sum = None, None, None, None
        if decay is not None and read_decay is None and write_decay is None:
            enter, leave, of_pairs, total = exponents(
                decay, batch, t, head, rows, valid, C, PER_TOKEN, BACKWARD, MIRRORED
            )
            enter, leave = by_row(tl.exp2(enter), MIRRORED), by_row(tl.exp2(leave), MIRRORED)
            of_pairs = tl.exp2(of_pairs)
        if read_decay is not None:
            read_left = tl.exp(sum_rows(read_logs, MIRRORED))
            between = j <= i if (x is None) == BACKWARD else j > i
            read_weights = tl.exp(times(between.to(tl.bfloat16), read_logs, MIRRORED, THREE_TERMS))
            if x is None:
                y_rows = y_rows * read_weights
            else:
                x_rows = x_rows * read_weights

        if totals is None and write_decay is None:  # else the scale is in what was prepared, or in what follows
            of_pairs = weigh(scale, of_pairs)
            if BACKWARD:
                leave = weigh(scale, leave)
            else:
                enter = weigh(scale, enter)

        # What the state gives to the tokens, and their pairs. The terms of the state take many registers, and so do the
        # weights of each channel that is written: they come after it.
        if x is not None:
            values = times(x_rows, state, MIRRORED, PRECISION)
            if COUNTS:
                of_counted = values * by_row(rows + 1, MIRRORED) + times(x_rows, counted, MIRRORED, PRECISION)
                found += of_counted * enter * m_rows
            if write_decay is None:
                values = weigh(values, enter)
            if y is not None and scores is None:
                pairs = weigh(times(x_rows, tl.trans(y_rows), MIRRORED, PRECISION), of_pairs)
        if write_decay is not None:
            if write_totals is None:
                left = tl.exp(sum_rows(logs, MIRRORED))
            from_start = tl.exp(times((j <= i).to(tl.bfloat16), logs, MIRRORED, THREE_TERMS))
            to_end = tl.exp(times((j > i).to(tl.bfloat16), logs, MIRRORED, THREE_TERMS))
            enter, leave = (to_end, scale * from_start) if BACKWARD else (scale * from_start, to_end)
            if left_out is not None:
                of_sum = enter * by_column(tl.where(too_far, 0.0, 1.0 / tl.maximum(left, SMALLEST)), MIRRORED)
            if x is not None:
                values = weigh(values, enter)

        # What they leave of the state, and what they add to it.
        if totals is not None or read_decay is not None:
            state *= by_row(read_left, MIRRORED)
        if write_decay is not None:
            state *= by_column(left, MIRRORED)
        elif decay is not None and read_decay is None:
            if COUNTS:
                counted = (counted + state * tl.minimum(valid, C)) * tl.exp2(total)
            state *= tl.exp2(total)
        if y is not None:
            added = z_rows if leave is None else z_rows.to(tl.float32) * leave
            state += times(tl.trans(y_rows), added, MIRRORED, ADDED)
            if COUNTS:
                decays_left = tl.maximum(tl.minimum(valid, C) - 1 - rows, 0)
                counted += times(tl.trans(y_rows), added * by_row(decays_left, MIRRORED), MIRRORED, ADDED)
            if write_decay is not None:
                z_rows = added

        # What they give to each other, and each to itself.
        if x is not None:
            if m is not None and write_decay is not None and y is not None:
                exchanged = sum_rows(values * m_rows, MIRRORED)
            if y is not None:
                if m is not None and not COUNTS:
                    others = tl.where(i < j if BACKWARD else i > j, pairs, 0.0)
                elif scores is not None:
                    others = pairs
                else:
                    others = tl.where(i <= j if BACKWARD else i >= j, pairs, 0.0)
                values += weigh(times(others, z_rows, MIRRORED, PRECISION), of_sum)
            if m is not None:
                if COUNTS:
                    found_inside += others * tl.abs(i - j) * times(m_rows, tl.trans(z_rows), MIRRORED, PRECISION)
                elif write_decay is None:
                    of_rows = row_of(sums, batch, t + SHIFT, head * tiles + tile) + rows * sums.token
                    tl.store(of_rows, sum_columns(values * m_rows, MIRRORED), mask=rows < valid - SHIFT)
                else:
                    gradient = values * m_rows
                    if BACKWARD and y is not None:
                        crosses = (left > NOTHING) & ((t > start) | (starts_empty == 0))
                        gradient, held = channel_gradient(
                            forward - gradient, forward, exchanged, held, crosses, logs, i, j, MIRRORED
                        )
                        tl.debug_barrier()  # all warps have read what they overwrite
                    elif y is not None:
                        gradient = tl.where(i == 0, by_column(exchanged, MIRRORED), gradient)
                    gradient = oriented(gradient, MIRRORED)
                    store_rows(sums, batch, t + SHIFT, head, rows, valid - SHIFT, writes, gradient, WHOLE)
                if y is not None and not COUNTS:
                    own = times(tl.where(i == j, pairs, 0.0), z_rows, MIRRORED, OWN)
                    values += weigh(own, of_sum)
            if result is not None:
                store_rows(result, batch, t, head, rows, valid, writes, oriented(values, MIRRORED), WHOLE)
        if CARRY:
            boundary = program * 0 + carried_to
            if ((step + 1) % in_segment == 0) | (step + 1 == steps):
                store_oriented_state(
                    leaving, sequence, head, boundary, reads, writes, read_size, write_size, state, MIRRORED
                )  # fmt: skip

    if leaving is not None and not CARRY:
        store_oriented_state(
            leaving, sequence, head, after, reads, writes, read_size, write_size, state, MIRRORED
        )  # fmt: skip
    if COUNTS or (m is not None and y is None):
        crossed = counted if COUNTS else state
        if boundaries is not None:
            crossed *= load_oriented_state(
                boundaries, sequence, head, after, reads, writes, read_size, write_size, MIRRORED
            )  # fmt: skip
        else:
            crossed = tl.zeros_like(crossed)
        if write_decay is None:
            total = tl.sum(crossed)
            if COUNTS:
                total += tl.sum(found) + tl.sum(found_inside)
            tl.store(row_of(crossing, sequence.to(tl.int64), segment, head * tiles + tile), total)
        else:
            into = row_of(crossing, sequence.to(tl.int64), segment, head) + writes
            tl.store(into, sum_rows(crossed, MIRRORED), mask=writes < write_size)


@triton.jit
def channel_gradient(change, forward, exchanged, held, crosses, logs, i, j, MIRRORED: tl.constexpr):
    """The gradient of a decay per channel at the tokens of a chunk, ``[C, W]``, and what is held before it, ``[W]``.

    As in :func:`~.decay_sums.sum_decay_gradient` it grows from a token to the one before by ``change``, q ⊙ dq - k ⊙ dk
    (of the values: o ⊙ do - v ⊙ dv; ``forward`` is the first of the two), from what is held after the chunk, S ⊙ dS
    summed over the other axis. But only what the chunk ``exchanged`` with the states is taken from and added to that,
    and not the pairs inside it, which would leave their rounding behind. The walk forward in time left what it
    exchanged in place of the first row, which no other token's gradient has.

    Where nothing crosses the chunk, all that is held after it began in it. Where a decay leaves nothing, the gradient
    is 0.
    """
    held = tl.where(crosses, held, exchanged)
    gradient = times((j >= i).to(tl.bfloat16), change, MIRRORED, THREE_TERMS) + by_column(held, MIRRORED)
    held = tl.where(crosses, held - exchanged, 0.0) + sum_rows(tl.where(i == 0, forward, 0.0), MIRRORED)
    gradient = tl.where(i == 0, by_column(held, MIRRORED), gradient)
    return tl.where(logs > LOG_NOTHING, gradient, 0.0), held
