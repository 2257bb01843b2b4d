"""What the tokens of one chunk do to each other, on the device, whatever they decay by.

``x`` reads ``y`` and collects ``z``: r_i = Σ_j w_ij (x_i · y_j) z_j, over j ≤ i forward and j ≥ i backward in time.
The axis of x and y is *read*, that of z and r *written*; with a decay per channel of either there is no one matrix of
weights. Blocks of 1, 2, 4, ... tokens are merged, and at each merge the tokens of one block read those
of the other through their common boundary, weighed up to it: matrix products only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fulmen.triton_common.decays import boundary_mask, channel_weights, pair_mask
from fulmen.triton_common.products import product, sum_where


@triton.jit
def scores(x, y, logs, rows, LEVELS: tl.constexpr, BACKWARD: tl.constexpr, PRECISION: tl.constexpr):
    """``[C, C]``: x_i · (w_ij ⊙ y_j), whole; ``logs`` are those of the read axis."""
    itself = tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
    result = tl.where(rows[:, None] == rows[None, :], itself[:, None], 0.0)
    for level in tl.static_range(LEVELS):
        weights = channel_weights(logs, boundary_mask(rows, level))
        across = product(x * weights, tl.trans(y * weights), PRECISION)
        result = tl.where(pair_mask(rows, level, BACKWARD), across, result)
    return result


@triton.jit
def collect(
    pairs, z, m, logs, rows, LEVELS: tl.constexpr, BACKWARD: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """``[C, W]``: Σ_j pairs_ij w_ij ⊙ z_j; ``logs`` are those of the written axis.

    Also this sum's part of that decay's gradient, where ``m`` is given, the factor of the results in the loss: a pair
    counts for every token between its two; so what i collects across a boundary, times m_i, counts for those on i's
    side of it.
    """
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
