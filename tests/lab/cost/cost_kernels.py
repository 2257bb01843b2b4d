"""Kernels to be modelled, with what the model has to know: loops, products, pipelined copies, barriers."""

import triton
import triton.language as tl


@triton.jit
def sum_products(x, y, result, length, C: tl.constexpr, D: tl.constexpr):
    """Σ_t x_t y_tᵀ of one program's tokens, as a sum over chunks on tensor cores."""
    program, channels, rows = tl.program_id(0), tl.arange(0, D), tl.arange(0, C)
    total = tl.zeros([D, D], tl.float32)
    for step in range(tl.cdiv(length, C)):
        places = (program * length + step * C + rows)[:, None] * D + channels[None, :]
        total += tl.dot(tl.trans(tl.load(x + places)), tl.load(y + places))
    tl.store(result + program * D * D + channels[:, None] * D + channels[None, :], total)
