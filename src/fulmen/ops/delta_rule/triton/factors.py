"""How many terms the factors of a product have: more for those that the tokens of a chunk have among themselves.

Where keys are alike and β is near 2, X, M and the sums of pairs take most of U, Y and dU away again, so that what was
rounded before is most of what is left. What reads a state or its gradient (R, weighed rows, S and G) has no such sums
after it, and its products, which are the large ones, are left as they are.

    products                                                of "one term"    "two terms"
    with S or G, but for what is added to them              one              two            rounded_product
    U and dU with M, k and R; pairs of keys, and with k
    the gradients of pairs that dq is made of               two              two            product_of_tokens
    X with V and dU; Y with dO and dV                       two              three          product_of_errors

A factor that is kept as bfloat16 is one term whatever its product has. Two terms are both rounded: the gradient of a
decay is a sum in which equal tokens leave a thousandth, and what is cut off always has one sign.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fulmen.triton_common.products import ONE_TERM, THREE_TERMS, TWO_ROUNDED_TERMS, TWO_TERMS, product


@triton.jit
def rounded_product(a, b, PRECISION: tl.constexpr):
    TERMS: tl.constexpr = TWO_ROUNDED_TERMS if PRECISION == TWO_TERMS else PRECISION
    return product(a, b, TERMS)


@triton.jit
def product_of_tokens(a, b, PRECISION: tl.constexpr):
    """With two terms at least."""
    TERMS: tl.constexpr = TWO_TERMS if PRECISION == ONE_TERM else PRECISION
    return rounded_product(a, b, TERMS)


@triton.jit
def product_of_errors(a, b, PRECISION: tl.constexpr):
    """With one term more."""
    TERMS: tl.constexpr = THREE_TERMS if PRECISION == TWO_TERMS else PRECISION
    return product_of_tokens(a, b, TERMS)
