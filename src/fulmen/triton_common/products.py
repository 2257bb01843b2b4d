"""Matrix products on tensor cores that lose nothing of 16-bit inputs and little of what is computed from them.

A product of two 16-bit tensors as they came is exact up to the float32 sum. What the kernels compute themselves
(scores, states, weighed rows) is float32; rounding it to 16 bits would cost as much again as rounding the result. So it
goes in as a sum of bfloat16 terms, which also have the range of float32: a state or score beyond 65504 is no problem
for float16 inputs. ``PRECISION`` says how:

    "two terms"      x ≈ hi + mid to 2^-17: for results that are rounded to 16 bits
    "three terms"    x ≈ hi + mid + low to 2^-25: for states and gradients of decays, which are float32
    "tf32x3" (NVIDIA) and "ieee" (AMD): for float32 inputs, as tl.dot's input_precision

Operands may have slices, ``[S, rows, columns]``: as many products, of which Triton gives each to a warp of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

TWO_TERMS = tl.constexpr("two terms")
THREE_TERMS = tl.constexpr("three terms")


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """``a @ b`` in float32."""
    if PRECISION != TWO_TERMS and PRECISION != THREE_TERMS:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
    elif a.dtype == b.dtype and a.dtype != tl.float32:
        result = tl.dot(a, b)
    else:
        result = product_of_terms(a, b, PRECISION)
    return result


@triton.jit
def product_of_terms(a, b, PRECISION: tl.constexpr):
    """The smallest terms are added first."""
    a_high, a_middle, a_low = terms(a)
    b_high, b_middle, b_low = terms(b)
    total = None
    if PRECISION == THREE_TERMS:
        if a.dtype == tl.float32:
            total = tl.dot(a_low, b_high, total)
        if b.dtype == tl.float32:
            total = tl.dot(a_high, b_low, total)
        if a.dtype != tl.bfloat16 and b.dtype != tl.bfloat16:
            total = tl.dot(a_middle, b_middle, total)
    if a.dtype != tl.bfloat16:
        total = tl.dot(a_middle, b_high, total)
    if b.dtype != tl.bfloat16:
        total = tl.dot(a_high, b_middle, total)
    return tl.dot(a_high, b_high, total)


@triton.jit
def sum_where(mask, x):
    """Σ_t over ``mask[i, t]`` of ``x[t, :]`` (of each slice of x), as float32 sums.

    ``x`` must be finite, for 0 · inf is NaN.
    """
    high, middle, low = terms(x)
    ones = for_each_slice(mask.to(tl.bfloat16), x)
    return tl.dot(ones, high, tl.dot(ones, middle, tl.dot(ones, low)))


@triton.jit
def sum_slices(x):
    return x if len(x.shape) == 2 else tl.sum(x, 0)


@triton.jit
def transposed(x):
    return tl.trans(x) if len(x.shape) == 2 else tl.trans(x, 0, 2, 1)


@triton.jit
def for_each_slice(a, x):
    """The matrix ``a`` as often as ``x`` has slices."""
    return a if len(x.shape) == 2 else tl.broadcast_to(a[None], [x.shape[0], a.shape[0], a.shape[1]])


@triton.jit
def terms(x):
    """``x`` as a sum of three bfloat16; one holds a bfloat16, two hold a float16."""
    high = x.to(tl.bfloat16)
    rest = x.to(tl.float32) - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)
