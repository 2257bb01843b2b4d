"""The weights of every decay, on the device: sums of logarithms that only ever add, and no exponent above zero.

A *scalar* decay has one logarithm per token (or head) for all channels; a *channel* decay has one per token and
channel. A weight is e to the sum of the logarithms of some tokens, and which tokens is a 0/1 matrix over (row, token):

    entering, forward in time:      all tokens up to and including the row
    entering, backward in time:     all tokens after the row
    to the boundary of two blocks:  all tokens between the row and the boundary

Both directions use the same weights: what enters a chunk on the one side leaves it on the other. The gradient of a sum
of logarithms is the sum over the transposed matrix.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fulmen.triton_common.mirrored import by_column, by_row
from fulmen.triton_common.operands import load_column, load_rows, row_of
from fulmen.triton_common.products import sum_where

# e^FORGET is 0, as for -inf; but 0 · FORGET is 0 too, and a bfloat16 holds it whole.
FORGET = tl.constexpr(-(2.0**100))
# The same for sums in base 2 that are subtracted: 2^FORGOTTEN is 0, and 128 of them are known to a sixteenth.
FORGOTTEN = tl.constexpr(-(2.0**12))
TO_SIXTEENTHS = tl.constexpr(1.5 * 2.0**19)  # added to a float32 below 2^18, it leaves multiples of 1/16
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def scalar_logs(decay, batch, token, head, rows, valid, PER_TOKEN: tl.constexpr):
    """``[C]``; tokens beyond the end do not decay."""
    if PER_TOKEN:
        pointers = row_of(decay, batch, token, head) + rows * decay.token
        logs = tl.load(pointers, mask=rows < valid, other=0.0).to(tl.float32)
    else:
        logs = tl.where(rows < valid, tl.load(decay.pointer + head).to(tl.float32), 0.0)
    return logs


@triton.jit
def channel_logs(decay, batch, token, head, rows, valid, columns, scalar=None):
    """``[C, K]``; tokens and channels beyond the end do not decay. With those of a ``scalar`` decay, of every token."""
    logs = load_rows(decay, batch, token, head, rows, valid, columns).to(tl.float32)
    if scalar is not None:
        logs += load_column(scalar, batch, token, head, rows, valid, 0)[:, None]
    return tl.maximum(logs, FORGET)


@triton.jit
def entering_mask(rows, BACKWARD: tl.constexpr):
    """Which tokens (columns) stand between each row and the boundary where the state enters the chunk."""
    return rows[None, :] > rows[:, None] if BACKWARD else rows[None, :] <= rows[:, None]


@triton.jit
def boundary_mask(rows, level):
    """Which tokens (columns) stand between each row and the boundary of the two blocks of 2^level it belongs to."""
    boundary = (((rows >> (level + 1)) * 2 + 1) << level)[:, None]
    row, token = rows[:, None], rows[None, :]
    return ((token <= row) & (token >= boundary)) | ((token > row) & (token < boundary))


@triton.jit
def pair_mask(rows, level, BACKWARD: tl.constexpr):
    """Which pairs (row, column) meet at the boundary of two blocks of 2^level: the row reads the column across it."""
    row, column = rows[:, None], rows[None, :]
    same = (row >> (level + 1)) == (column >> (level + 1))
    return same & ((row >> level) < (column >> level) if BACKWARD else (row >> level) > (column >> level))


@triton.jit
def triangle(rows, BACKWARD: tl.constexpr):
    """Which columns a row reads, itself included."""
    return rows[:, None] <= rows[None, :] if BACKWARD else rows[:, None] >= rows[None, :]


@triton.jit
def scalar_weights(logs, mask):
    """``[C]``: e^(sum of the masked tokens' logarithms)."""
    return tl.exp(tl.sum(tl.where(mask, logs[None, :], 0.0), 1))


@triton.jit
def channel_weights(logs, mask):
    """``[C, K]``: the same for each channel."""
    return tl.exp(sum_where(mask, logs))


@triton.jit
def pair_weights(logs, rows, PER_TOKEN: tl.constexpr, BACKWARD: tl.constexpr):
    """``[C, C]``: e^(sum of the logarithms after the earlier and up to the later token of a pair)."""
    others = triangle(rows, BACKWARD) & (rows[:, None] != rows[None, :])
    if not PER_TOKEN:
        # The first token is always valid, so its logarithm is that of the head.
        log = tl.sum(tl.where(rows == 0, logs, 0.0))
        sums = tl.where(others, log * tl.abs(rows[:, None] - rows[None, :]).to(tl.float32), 0.0)
    elif BACKWARD:
        sums = tl.cumsum(tl.where(others, logs[None, :], 0.0), 1)
    else:
        sums = tl.cumsum(tl.where(others, logs[:, None], 0.0), 0)
    return tl.exp(sums)


@triton.jit
def exponents(
    decay, batch, token, head, rows, valid,
    C: tl.constexpr, PER_TOKEN: tl.constexpr, BACKWARD: tl.constexpr, MIRRORED: tl.constexpr,
):  # fmt: skip
    """Sums of a scalar decay's logarithms, in base 2: from each row of a chunk to where the state enters, to where it
    leaves (``[C]`` each), between two rows (``[C, C]``, 0 where the row does not read the column), and of all.

    Tokens beyond the end do not decay. Sums between tokens are differences of sums from the start of the chunk, which
    is exact because these are kept in two parts: multiples of a sixteenth, which float32 adds and subtracts without
    rounding, and what is left of each logarithm. So a decay of -90 takes no digits from those beside it, and -inf is
    but a large number.
    """
    i, j = by_row(rows, MIRRORED), by_column(rows, MIRRORED)
    causal = i <= j if BACKWARD else i >= j
    if PER_TOKEN:
        pointers = row_of(decay, batch, token, head) + rows * decay.token
        logs = tl.load(pointers, mask=rows < valid, other=0.0).to(tl.float32) * LOG2_E
        logs = tl.where(logs < FORGOTTEN, FORGOTTEN, logs)  # NaN stays
        coarse = (logs + TO_SIXTEENTHS) - TO_SIXTEENTHS
        fine = logs - coarse
        of_all, of_all_fine = tl.sum(coarse, 0), tl.sum(fine, 0)
        coarse, fine = tl.cumsum(coarse, 0), tl.cumsum(fine, 0)
        before, after = coarse + fine, (of_all - coarse) + (of_all_fine - fine)
        total = of_all + of_all_fine
        between = by_row(coarse, MIRRORED) - by_column(coarse, MIRRORED)
        between_fine = by_row(fine, MIRRORED) - by_column(fine, MIRRORED)
        between = -(between + between_fine) if BACKWARD else between + between_fine
    else:
        log = tl.load(decay.pointer + head).to(tl.float32) * LOG2_E
        log = tl.where(log < FORGOTTEN, FORGOTTEN, log)
        count = tl.minimum(valid, C)
        before = log * tl.minimum(rows + 1, count).to(tl.float32)
        after = log * tl.maximum(count - 1 - rows, 0).to(tl.float32)
        total = log * count.to(tl.float32)
        between = log * tl.abs(i - j).to(tl.float32)
    between = tl.where(causal, between, 0.0)
    return (after, before, between, total) if BACKWARD else (before, after, between, total)


@triton.jit
def weigh(x, weights):
    return x if weights is None else x * weights
