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

from fulmen.triton_common.operands import load_rows, row_of
from fulmen.triton_common.products import sum_where

# e^FORGET is 0, as for -inf; but 0 · FORGET is 0 too, and a bfloat16 holds it whole.
FORGET = tl.constexpr(-(2.0**100))


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
def channel_logs(decay, batch, token, head, rows, valid, columns):
    """``[C, K]``; tokens and channels beyond the end do not decay."""
    return tl.maximum(load_rows(decay, batch, token, head, rows, valid, columns).to(tl.float32), FORGET)


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
def weigh(x, weights):
    return x if weights is None else x * weights


@triton.jit
def remaining(logs, write_logs):
    """What all tokens of the chunk leave of the state, ``[W]``, or ``[1]`` where the decay is a scalar one."""
    if write_logs is None:
        left = tl.exp(tl.sum(logs[None, :], 1))
    else:
        left = tl.exp(tl.sum(write_logs, 0))
        if logs is not None:
            left *= tl.exp(tl.sum(logs))
    return left


@triton.jit
def decayed(state, logs, read_logs, write_logs):
    """The state ``[R, W]`` after all tokens of the chunk."""
    if logs is not None:
        state *= tl.exp(tl.sum(logs))
    if read_logs is not None:
        state *= tl.expand_dims(tl.exp(tl.sum(read_logs, -2)), -1)
    if write_logs is not None:
        state *= tl.exp(tl.sum(write_logs, 0))[None, :]
    return state
