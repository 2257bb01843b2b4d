"""Matrix products on tensor cores, with as many digits of what enters them as are asked for.

A product of two 16-bit tensors as they came is exact up to the float32 sum. What the kernels compute themselves
(scores, states, weighed rows) is float32, and goes in as a sum of bfloat16 terms, which also have the range of float32:
a state or score beyond 65504 is no problem for float16 inputs. ``PRECISION`` says how:

    "one term"       x rounded to bfloat16: for bfloat16 inputs, where it costs as much again as rounding the result
    "two terms"      x ≈ hi + mid to 2^-17: for results that are rounded to 16 bits
    "two rounded terms"   to 2^-18, and as often too much as too little: for sums that take most of it away again
    "three terms"    x ≈ hi + mid + low to 2^-25: for states and gradients of decays, which are float32
    "tf32x3" (NVIDIA) and "ieee" (AMD): for float32 inputs, as tl.dot's input_precision
"""

from __future__ import annotations

import triton
import triton.language as tl

ONE_TERM = tl.constexpr("one term")
TWO_TERMS = tl.constexpr("two terms")
TWO_ROUNDED_TERMS = tl.constexpr("two rounded terms")
THREE_TERMS = tl.constexpr("three terms")


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """``a @ b`` in float32."""
    if PRECISION == ONE_TERM:
        result = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    elif PRECISION != TWO_TERMS and PRECISION != TWO_ROUNDED_TERMS and PRECISION != THREE_TERMS:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
    elif a.dtype == b.dtype and a.dtype != tl.float32:
        result = tl.dot(a, b)
    else:
        result = product_of_terms(a, b, PRECISION)
    return result


@triton.jit
def product_of_terms(a, b, PRECISION: tl.constexpr):
    """The smallest terms are added first."""
    a_high, a_middle, a_low = split(a, PRECISION)
    b_high, b_middle, b_low = split(b, PRECISION)
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
    """Σ_t over ``mask[i, t]`` of ``x[t, :]``, as float32 sums.

    ``x`` must be finite, for 0 · inf is NaN.
    """
    high, middle, low = terms(x)
    ones = mask.to(tl.bfloat16)
    return tl.dot(ones, high, tl.dot(ones, middle, tl.dot(ones, low)))


@triton.jit
def split(x, PRECISION: tl.constexpr):
    if PRECISION == THREE_TERMS:
        result = terms(x)
    elif PRECISION == TWO_ROUNDED_TERMS:
        result = two_rounded_terms(x)
    else:
        result = two_terms(x)
    return result


@triton.jit
def terms(x):
    """``x`` as a sum of three bfloat16; one holds a bfloat16, two hold a float16.

    Of a float32 the first two are cut off, not rounded: rounding each number and taking it away again would be a
    conversion on the slowest pipe of an SM, and the last one makes up for it.
    """
    if x.dtype == tl.float32:
        high = cut(x)
        middle = cut(x - high)
        result = high.to(tl.bfloat16), middle.to(tl.bfloat16), (x - high - middle).to(tl.bfloat16)
    else:
        high = x.to(tl.bfloat16)
        rest = x.to(tl.float32) - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        result = high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return result


@triton.jit
def two_terms(x):
    """``x`` as a sum of two bfloat16, and none."""
    high, middle, low = terms(x)
    if x.dtype == tl.float32:
        middle = (x - cut(x)).to(tl.bfloat16)  # rounded
    return high, middle, low


@triton.jit
def two_rounded_terms(x):
    """Where the first is cut off, it leaves twice as much to the second, always of the sign of x, and the product of
    two second terms, which is left out, is four times as large. Another conversion, where that matters."""
    high = x.to(tl.bfloat16)
    return high, (x.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16), None


@triton.jit
def cut(x):
    """A float32 without the digits that a bfloat16 has no room for."""
    return (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
