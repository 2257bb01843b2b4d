"""Traces of decode steps: torch's functions that the CPU core computes as well, for a few rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from fulmen.nn import native_matmul
from fulmen.runtime import core as c
from fulmen.runtime.core_structs import CODES, ELEMENTWISE, TENSOR, Words
from fulmen.runtime.program import Program, Trace
from fulmen.runtime.recording import recording
from fulmen.runtime.tensors import at_least_float32
from fulmen.runtime.torch_private import decomposed, eager_dispatch_mode, leaves_of

MOST_ROWS = 8  # of a step: for more, torch's products of float32 are faster
_AXES = 3

aten = torch.ops.aten


def traced(function: Callable[[], Tensor], arguments: list[Tensor]) -> tuple[Tensor, Program | None]:
    """``function()``, and what computes the same of other ``arguments`` like these; None if nothing does."""
    trace = Trace(arguments)
    with _watching()(trace):
        result = function()
    return result, trace.program(result)


@cache
def _watching() -> type[Any]:
    class Watching(eager_dispatch_mode()):  # type: ignore[misc]  # mypy cannot see a base class that is found at run time
        """Has the core compute what it can, and notes what it cannot."""

        def __init__(self, trace: Trace) -> None:
            super().__init__()
            self.trace = trace

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            ours = op if op.namespace == "fulmen" else _CALLS.get(op)
            if ours is op or (ours is not None and _fits(ours, args, kwargs)):
                with recording() as made:
                    result = ours(*args, **kwargs)
                if result is not None:
                    self.trace.add(made, _tensors(result))
                    return result
            with self:
                result = _PARTS[op](*args) if op in _PARTS and not kwargs else decomposed(op, args, kwargs)
            if result is not NotImplemented:
                return result
            result = op(*args, **kwargs)
            given = {x.untyped_storage().data_ptr() for x in _tensors([args, kwargs])}
            if any(x.untyped_storage().data_ptr() not in given for x in _tensors(result)) or op._schema.is_mutable:
                self.trace.complete = False  # no view
            return result

    return Watching


def _fits(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        return bool(signature(function).bind(*args, **kwargs))
    except TypeError:
        return False


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in leaves_of(tree) if isinstance(x, Tensor)]


# ---- the core's calls: None of arguments that they do not take -------------------------------------------------------


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """``weight`` is ``[inputs, outputs]``, with dense columns."""
    return _linear(x, weight.t(), bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if x.ndim != 2 or not native_matmul.takes(x, weight, bias) or not native_matmul.few_rows(x, weight, bias):
        return None
    return native_matmul.linear(x, weight, bias)


def _elementwise(
    function: str, a: Tensor, b: Tensor | float = 0.0, *, in_place: bool = False, dtype: torch.dtype | None = None
) -> Tensor | None:
    inputs = [x for x in (a, b) if isinstance(x, Tensor)]
    expanded = torch.broadcast_tensors(*inputs)
    shape = expanded[0].shape
    dtype = dtype or torch.result_type(a, b)
    if len(shape) > _AXES or any(x.dtype not in c.DTYPES for x in inputs) or dtype not in c.DTYPES:
        return None
    if in_place and shape != a.shape:
        return None
    output = a if in_place else a.new_empty(shape, dtype=dtype)
    batch, tokens, channels = (1,) * (_AXES - len(shape)) + shape
    packed = ELEMENTWISE.pack(
        header=c.header(ELEMENTWISE),
        batch=batch,
        tokens=tokens,
        channels=channels,
        function=CODES[function],
        scalar=0.0 if isinstance(b, Tensor) else b,
        a=_of_axes(expanded[0]),
        b=_of_axes(expanded[1]) if isinstance(b, Tensor) else c.NO_TENSOR,
        output=_of_axes(output),
    )
    c.require().run(ELEMENTWISE, packed)
    return output


def _of_axes(x: Tensor) -> Words:
    batch, token, channel = (0,) * (_AXES - x.ndim) + x.stride()
    return _words(x, batch, token, channel)


def _words(x: Tensor, batch: int, token: int, head: int) -> Words:
    return TENSOR.words(
        data=x.data_ptr(), dtype=c.DTYPES[x.dtype], stride_batch=batch, stride_token=token, stride_head=head
    )


def _log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor] | None:
    y = _elementwise("LOG_SIGMOID", x)
    return None if y is None else (y, y.new_empty(0))  # the second is for a backward


def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor | None:
    return _elementwise("SOFTPLUS", x) if (beta, threshold) == (1, 20) else None


def _converted(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor | None:
    return None if dtype is None else _elementwise("IDENTITY", x, dtype=dtype)


# Of torch's options only those that are parameters here.
_CALLS: dict[Any, Callable[..., Any]] = {
    aten.mm.default: _product,
    aten.addmm.default: lambda bias, x, weight: _product(x, weight, bias),
    aten.linear.default: _linear,
    aten.sigmoid.default: partial(_elementwise, "SIGMOID"),
    aten.silu.default: partial(_elementwise, "SILU"),
    aten.exp.default: partial(_elementwise, "EXP"),
    aten.neg.default: lambda x: _elementwise("MULTIPLY", x, -1.0),
    aten.softplus.default: _softplus,
    aten.log_sigmoid_forward.default: _log_sigmoid,
    aten._to_copy.default: _converted,
    aten.add.Tensor: partial(_elementwise, "ADD"),
    aten.add_.Tensor: partial(_elementwise, "ADD", in_place=True),
    aten.mul.Tensor: partial(_elementwise, "MULTIPLY"),
    aten.mul_.Tensor: partial(_elementwise, "MULTIPLY", in_place=True),
    aten.div.Tensor: partial(_elementwise, "DIVIDE"),
    aten.div_.Tensor: partial(_elementwise, "DIVIDE", in_place=True),
    aten.clamp_min.default: partial(_elementwise, "LARGER"),
    aten.clamp_max.default: partial(_elementwise, "SMALLER"),
}
# Others that are made of these.
_PARTS: dict[Any, Callable[..., Tensor]] = {
    aten.addcmul_.default: lambda y, a, b: y.add_(at_least_float32(a) * b),
    aten.clamp.default: lambda x, least, most: x.clamp_min(least).clamp_max(most),
}
