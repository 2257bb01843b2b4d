"""What the tokens of one chunk do to each other, on the device.

``x`` reads ``y`` and collects ``z``: r_i = Σ_j w_ij (x_i · y_j) z_j, over j ≤ i forward and j ≥ i backward in time.
The axis of x and y is *read*, that of z and r *written*; either may have a decay per channel, and then there is no one
matrix of weights. There, blocks of 1, 2, 4, ... tokens are merged, and at each merge the tokens of one block read those
of the other through their common boundary, weighed up to it: matrix products only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fulmen.triton_common.decays import boundary_mask, channel_weights, pair_mask, scalar_weights
from fulmen.triton_common.products import (
    THREE_TERMS,
    TWO_TERMS,
    for_each_slice,
    product,
    sum_slices,
    sum_where,
    transposed,
)


@triton.jit
def scores(x, y, logs, rows, LEVELS: tl.constexpr, BACKWARD: tl.constexpr, PRECISION: tl.constexpr):
    """``[C, C]``: x_i · (w_ij ⊙ y_j), whole; ``logs`` are those of a channel decay of the read axis, or None."""
    if logs is None:
        result = product(x, transposed(y), PRECISION)
    else:
        itself = tl.sum(x.to(tl.float32) * y.to(tl.float32), -1)
        result = tl.where(rows[:, None] == rows[None, :], tl.expand_dims(itself, -1), 0.0)
        for level in tl.static_range(LEVELS):
            weights = channel_weights(logs, boundary_mask(rows, level))
            across = product(x * weights, transposed(y * weights), PRECISION)
            result = tl.where(pair_mask(rows, level, BACKWARD), across, result)
    return sum_slices(result)


@triton.jit
def collect(
    pairs, z, m, logs, rows, LEVELS: tl.constexpr, BACKWARD: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """``[C, W]``: Σ_j pairs_ij w_ij ⊙ z_j; ``logs`` are those of a channel decay of the written axis, or None.

    Also this sum's part of that decay's gradient, where ``m`` is given, the factor of the results in the loss: a pair
    counts for every token between its two; so what i collects across a boundary, times m_i, counts for those on i's
    side of it.
    """
    if logs is None:
        result = product(pairs, z, PRECISION)
        gradient = tl.zeros_like(result)
    else:
        itself = tl.sum(tl.where(rows[:, None] == rows[None, :], pairs, 0.0), 1)
        result = itself[:, None] * z
        gradient = tl.zeros_like(result)
        for level in tl.static_range(LEVELS):
            boundary = boundary_mask(rows, level)
            weights = channel_weights(logs, boundary)
            met = tl.where(pair_mask(rows, level, BACKWARD), pairs, 0.0)
            across = weights * product(met, z * weights, PRECISION)
            result += across
            if m is not None:
                gradient += sum_where(tl.trans(boundary), m * across)
    return result, gradient


@triton.jit
def scalar_gradient(pairs, m, z, rows, PRECISION: tl.constexpr):
    """``[C]``: the gradient of a scalar decay through the ``pairs`` of a chunk, weighed, forward in time.

    A pair counts p_ij (m_i · z_j) for every token t with j < t ≤ i. Pairs j = i never enter: they do not decay.
    """
    earlier = rows[:, None] > rows[None, :]
    counted = tl.zeros_like(pairs)
    # Triton gives all products of one block that depend on each other the same layout, and this small square one would
    # make that a layout where every warp holds whole operands. The condition always holds, and LLVM drops it.
    if tl.program_id(0) >= 0:
        counted = tl.where(earlier, pairs * product(m, tl.trans(z), PRECISION), 0.0)
    return tl.sum(tl.where(earlier, tl.cumsum(counted, 0, reverse=True), 0.0), 1)


@triton.jit
def contribution(y, z, logs, read_logs, write_logs, leave, PRECISION: tl.constexpr):
    """``[R, W]``: what the tokens of a chunk add to the state after them, Σ_j (w_j ⊙ y_j) z_jᵀ.

    ``leave`` says which tokens stand between each one and the boundary where the state leaves. States are float32.
    """
    if logs is not None:
        z = z * scalar_weights(logs, leave)[:, None]
    if read_logs is not None:
        y = y * channel_weights(read_logs, leave)
    if write_logs is not None:
        z = z * channel_weights(write_logs, leave)
    return product(transposed(y), for_each_slice(z, y), THREE_TERMS if PRECISION == TWO_TERMS else PRECISION)
