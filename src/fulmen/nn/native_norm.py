"""RMSNorm on the CPU core (csrc/rms_norm.cpp): which calls it takes, and the ops ``fulmen::rms_norm`` and
``fulmen::rms_norm_backward``, which describe them to it. Others, and those of other devices, are
:mod:`fulmen.nn.norms`' own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulmen.runtime import core as c
from fulmen.runtime.core_structs import CODES, RMS_NORM, RMS_NORM_BACKWARD, TENSOR, Words
from fulmen.runtime.library import define
from fulmen.runtime.torch_private import are_plain

_ACTIVATIONS = {None: CODES["IDENTITY"], "silu": CODES["SILU"], "sigmoid": CODES["SIGMOID"]}
_AXES = 4  # of the core's tensors


def takes(x: Tensor, gate: Tensor | None, weight: Tensor) -> bool:
    """x and gate ``[..., size]``, weight ``[size]`` or ``[heads, size]``. Gradients are for the caller to record."""
    tensors = [x, weight] if gate is None else [x, weight, gate]
    return (
        c.core is not None
        and are_plain(tensors)
        and all(y.stride(-1) == 1 for y in tensors)
        and x.dtype in c.DTYPES
        and weight.dtype in (x.dtype, torch.float32)
        and (gate is None or (gate.dtype, gate.shape) == (x.dtype, x.shape))
        and x.shape[-weight.ndim :] == weight.shape
        and weight.ndim <= 2
        and x.ndim <= _AXES
    )


def takes_gradient(dy: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor) -> bool:
    """dy, that of the result, may have any strides."""
    return takes(x, gate, weight) and are_plain([dy])


def _results(x: Tensor, rates: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1) if rates else (0,), dtype=torch.float32)


def _run(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, activation: str | None, gate_first: bool, rates: bool
) -> tuple[Tensor, Tensor]:
    output, rate = _results(x, rates)
    packed = RMS_NORM.pack(
        header=c.header(RMS_NORM),
        **_norm(x, gate, weight, activation, gate_first),
        epsilon=eps,
        output=_tensor(output),
        rates=rate.data_ptr() if rates else 0,
    )
    c.require().run(RMS_NORM, packed)
    return output, rate


def _gradients(x: Tensor, gate: Tensor | None, weight: Tensor, of_weight: bool) -> tuple[Tensor, Tensor, Tensor]:
    dweight = weight.new_empty(weight.shape if of_weight else (0,), dtype=torch.float32)
    return x.new_empty(x.shape), x.new_empty((0,) if gate is None else x.shape), dweight


def _run_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    rate: Tensor,
    activation: str | None,
    gate_first: bool,
    of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dgate, dweight = _gradients(x, gate, weight, of_weight)
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    packed = RMS_NORM_BACKWARD.pack(
        header=c.header(RMS_NORM_BACKWARD),
        **_norm(x, gate, weight, activation, gate_first),
        weight_heads=1 if weight.ndim == 1 else weight.shape[0],
        grad_output=_tensor(dy),
        dx=_tensor(dx),
        dgate=c.NO_TENSOR if gate is None else _tensor(dgate),
        rates=rate.data_ptr(),
        dweight=dweight.data_ptr() if of_weight else 0,
    )
    c.require().run(RMS_NORM_BACKWARD, packed)
    return dx, dgate, dweight


def _norm(x: Tensor, gate: Tensor | None, weight: Tensor, activation: str | None, gate_first: bool) -> dict[str, Any]:
    """What a norm and its gradients have in common."""
    batch, tokens, heads, size = (1,) * (_AXES - x.ndim) + x.shape
    return {
        "batch": batch,
        "tokens": tokens,
        "heads": heads,
        "size": size,
        "activation": _ACTIVATIONS[activation],
        "gate_first": gate_first,
        "x": _tensor(x),
        "gate": c.NO_TENSOR if gate is None else _tensor(gate),
        "weight": _tensor(weight),
    }


def _tensor(x: Tensor) -> Words:
    """Axes that x has not got are before those that it has."""
    batch, token, head, _ = (0,) * (_AXES - x.ndim) + x.stride()
    return TENSOR.words(
        data=x.data_ptr(), dtype=c.DTYPES[x.dtype], stride_batch=batch, stride_token=token, stride_head=head
    )


rms_norm = define(
    """rms_norm(Tensor x, Tensor? gate, Tensor weight, float eps, str? activation, bool gate_first,
    bool rates) -> (Tensor, Tensor)""",
    _run,
    lambda x, gate, weight, eps, activation, gate_first, rates: _results(x, rates),
)
_backward = define(
    """rms_norm_backward(Tensor dy, Tensor x, Tensor? gate, Tensor weight, Tensor rate, str? activation,
    bool gate_first, bool of_weight) -> (Tensor, Tensor, Tensor)""",
    _run_backward,
    lambda dy, x, gate, weight, rate, activation, gate_first, of_weight: _gradients(x, gate, weight, of_weight),
)


def gradients(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    rate: Tensor,
    activation: str | None,
    gate_first: bool,
    of_weight: bool,
) -> tuple[Tensor | None, ...]:
    """Of x, gate and weight, given that of the result and what each row was multiplied by."""
    dx, dgate, dweight = _backward(dy, x, gate, weight, rate, activation, gate_first, of_weight)
    return dx, None if gate is None else dgate, dweight.to(weight.dtype) if of_weight else None
