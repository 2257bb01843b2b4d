"""a bᵀ + bias on the CPU core (csrc/matmul.cpp, and csrc/linear.cpp for a few rows): which factors it takes, and the op
``fulmen::matmul``, which describes them to it. Its gradients are such products too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulmen.runtime import core as c
from fulmen.runtime.core_structs import LINEAR, MATMUL, TENSOR, Words
from fulmen.runtime.library import define, define_gradient
from fulmen.runtime.torch_private import PLAIN_TYPES

MOST_ROWS = 12  # that are multiplied without packing the weights


def takes(a: Tensor, b: Tensor, bias: Tensor | None) -> bool:
    """a ``[..., depth]``, b ``[columns, depth]``, bias ``[columns]``. No subclasses of tensors: weights may be
    quantised or sharded, whatever dtype they say."""
    tensors = (a, b) if bias is None else (a, b, bias)
    return (
        c.core is not None
        and a.dtype in c.DTYPES
        and all(type(x) in PLAIN_TYPES for x in tensors)
        and all(x.dtype == a.dtype and x.device.type == "cpu" and x.layout == torch.strided for x in tensors)
        and a.ndim > 1
        and b.ndim == 2
        and a.shape[-1] == b.shape[1]
        and (bias is None or bias.shape == b.shape[:1])
    )


def _result(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0])


def _run(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if few_rows(a, b, bias):
        return linear(a, b, bias)
    output = _result(a, b, bias)
    (a, of_a), (b, of_b) = _factor(a), _factor(b)
    packed = MATMUL.pack(
        header=c.header(MATMUL),
        rows=a.shape[0],
        columns=b.shape[0],
        depth=a.shape[1],
        a=of_a,
        b=of_b,
        bias=_bias(bias),
        output=_words(output, output.stride(0), 0),
    )
    c.require().run(MATMUL, packed)
    return output


def few_rows(a: Tensor, b: Tensor, bias: Tensor | None) -> bool:
    """Whether :func:`linear` takes these: a few rows, and one pass over weights whose rows are dense."""
    return 0 < a.shape[0] <= MOST_ROWS and a.stride(1) == b.stride(1) == 1 and b.numel() > 0


def linear(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """The same for a few rows (csrc/linear.cpp), each with the bits that it has alone."""
    output = _result(a, b, bias)
    packed = LINEAR.pack(
        header=c.header(LINEAR),
        rows=a.shape[0],
        inputs=a.shape[1],
        outputs=b.shape[0],
        x=_words(a, a.stride(0), 0),
        weight=_words(b, b.stride(0), 0),
        bias=_bias(bias),
        output=_words(output, output.stride(0), 0),
    )
    c.require().run(LINEAR, packed)
    return output


def _bias(bias: Tensor | None) -> Words:
    return c.NO_TENSOR if bias is None else _words(bias, bias.stride(0), 0)


def _factor(x: Tensor) -> tuple[Tensor, Words]:
    """With dense rows or columns: itself, or a copy where it has neither; and how it is described."""
    row, along = (1 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))
    if 1 not in (row, along):
        x, row, along = x.contiguous(), x.shape[1], 1
    return x, _words(x, row, along)


def _words(x: Tensor, row: int, along: int) -> Words:
    return TENSOR.words(data=x.data_ptr(), dtype=c.DTYPES[x.dtype], stride_batch=0, stride_token=row, stride_head=along)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, _ = inputs
    ctx.save_for_backward(a, b)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    for_a, for_b, for_bias = ctx.needs_input_grad[:3]
    return (
        matmul(grad, b.t(), None) if for_a else None,
        matmul(grad.t(), a.t(), None) if for_b else None,
        grad.sum(0) if for_bias else None,
    )


define(
    "matmul(Tensor a, Tensor b, Tensor? bias) -> Tensor",
    _run,
    _result,
    shared={"b": 2, "bias": 1},
)
matmul = define_gradient("matmul", _gradient, _keep)
"""a ``[rows, depth]``, b ``[columns, depth]``, bias ``[columns]``, all of one dtype: a bᵀ + bias, summed in float32 and
rounded once."""
