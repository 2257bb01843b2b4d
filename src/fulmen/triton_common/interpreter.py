"""bfloat16 in Triton's interpreter, which keeps it as the bits of an uint16 and computes on these bits.

:func:`correct_bfloat16` makes operations convert to float32, compute, and round to nearest even, as hardware does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import triton.language as tl

from fulmen.triton_common.triton_private import interpreter

InterpreterBuilder, TensorHandle = interpreter()


def widen(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: Any) -> Any:
    """float32 rounded to the bits of a bfloat16, to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def is_bfloat16(x: Any) -> bool:
    return isinstance(x, TensorHandle) and x.dtype.scalar == tl.bfloat16


def as_float32(x: Any) -> Any:
    return TensorHandle(widen(x.data), tl.float32) if is_bfloat16(x) else x


def _through_float32(operation: Any) -> Any:
    def run(self: Any, *args: Any) -> Any:
        if not any(map(is_bfloat16, args)):
            return operation(self, *args)
        result = operation(self, *map(as_float32, args))
        return result if result.data.dtype == np.bool_ else TensorHandle(narrow(result.data), tl.bfloat16)

    return run


@cache
def correct_bfloat16() -> None:
    """Change the interpreter of this process, once."""
    builder: Any = InterpreterBuilder
    for name in ("binary_op", "unary_op", "ternary_op"):
        setattr(builder, name, _through_float32(getattr(builder, name)))
    cast, dot, convert = builder.cast_impl, builder.create_dot, builder.create_fp_to_fp

    def cast_through_float32(self: Any, source: Any, target: Any) -> Any:
        if target.scalar == tl.bfloat16 and not is_bfloat16(source):
            return TensorHandle(narrow(source.data.astype(np.float32)), tl.bfloat16)
        return cast(self, source if target.scalar == tl.bfloat16 else as_float32(source), target)

    def convert_through_float32(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if is_bfloat16(source) or target.scalar == tl.bfloat16:
            return cast_through_float32(self, source, target)
        return convert(self, source, target, rounding)

    builder.cast_impl = cast_through_float32
    builder.create_fp_to_fp = convert_through_float32
    builder.create_dot = lambda self, a, b, *rest: dot(self, as_float32(a), as_float32(b), *rest)
    builder.get_bf16 = lambda self, value: TensorHandle(narrow(np.array([value], np.float32)), tl.bfloat16)
