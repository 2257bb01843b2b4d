"""Kernels that are written once and compute either a matrix or, ``MIRRORED``, its transpose.

Which of the two is faster is a question of the architecture: the left factor of a product on NVIDIA's before Hopper
stays in registers where it was computed, the right one goes through shared memory. In a mirrored kernel every matrix
is held as its transpose, ``[C, K]`` as ``[K, C]``, and ``a @ b`` is computed as ``bᵀ @ aᵀ``; so the text of a kernel
says what it computes, and these functions where it is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fulmen.triton_common.operands import load_state, store_state
from fulmen.triton_common.products import product


@triton.jit
def oriented(x, MIRRORED: tl.constexpr):
    """A matrix as the kernel holds it; and back."""
    return tl.trans(x) if MIRRORED else x


@triton.jit
def by_row(x, MIRRORED: tl.constexpr):
    """``[C]`` as one number for each row of a matrix."""
    return x[None, :] if MIRRORED else x[:, None]


@triton.jit
def by_column(x, MIRRORED: tl.constexpr):
    return x[:, None] if MIRRORED else x[None, :]


@triton.jit
def times(a, b, MIRRORED: tl.constexpr, PRECISION: tl.constexpr):
    """``a @ b`` of matrices as the kernel holds them."""
    return product(b, a, PRECISION) if MIRRORED else product(a, b, PRECISION)


@triton.jit
def sum_columns(x, MIRRORED: tl.constexpr):
    """One number for each row."""
    return tl.sum(x, 0 if MIRRORED else 1)


@triton.jit
def sum_rows(x, MIRRORED: tl.constexpr):
    """One number for each column."""
    return tl.sum(x, 1 if MIRRORED else 0)


@triton.jit
def load_oriented_state(
    x, sequence, head, boundary, rows, columns, row_size, column_size, MIRRORED: tl.constexpr
):  # fmt: skip
    """:func:`~fulmen.triton_common.operands.load_state`, of States whose strides are those of the transpose where the
    kernel is mirrored."""
    if MIRRORED:
        rows, columns, row_size, column_size = columns, rows, column_size, row_size
    return load_state(x, sequence, head, boundary, rows, columns, row_size, column_size)


@triton.jit
def store_oriented_state(
    x, sequence, head, boundary, rows, columns, row_size, column_size, values, MIRRORED: tl.constexpr
):  # fmt: skip
    if MIRRORED:
        rows, columns, row_size, column_size = columns, rows, column_size, row_size
    store_state(x, sequence, head, boundary, rows, columns, row_size, column_size, values)
