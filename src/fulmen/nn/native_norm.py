"""RMSNorm on the CPU core (csrc/rms_norm.cpp): which calls it takes, and the op ``fulmen::rms_norm``, which describes
them to it. Others, and those of other devices, are :mod:`fulmen.nn.norms`' own."""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.runtime import core as c
from fulmen.runtime.core_structs import CODES, RMS_NORM, TENSOR, Words
from fulmen.runtime.library import define
from fulmen.runtime.torch_private import is_plain

_ACTIVATIONS = {None: CODES["IDENTITY"], "silu": CODES["SILU"], "sigmoid": CODES["SIGMOID"]}
_AXES = 4  # of the core's tensors


def takes(x: Tensor, gate: Tensor | None, weight: Tensor) -> bool:
    """x and gate ``[..., size]``, weight ``[size]`` or ``[heads, size]``."""
    tensors = (x, weight) if gate is None else (x, weight, gate)
    return (
        c.core is not None
        and all(is_plain(y) and y.stride(-1) == 1 for y in tensors)
        and x.dtype in c.DTYPES
        and weight.dtype in (x.dtype, torch.float32)
        and (gate is None or (gate.dtype, gate.shape) == (x.dtype, x.shape))
        and x.shape[-weight.ndim :] == weight.shape
        and weight.ndim <= 2
        and x.ndim <= _AXES
    )


def _results(x: Tensor, rates: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1) if rates else (0,), dtype=torch.float32)


def _run(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, activation: str | None, gate_first: bool, rates: bool
) -> tuple[Tensor, Tensor]:
    output, rate = _results(x, rates)
    batch, tokens, heads, size = (1,) * (_AXES - x.ndim) + x.shape
    packed = RMS_NORM.pack(
        header=c.header(RMS_NORM),
        batch=batch,
        tokens=tokens,
        heads=heads,
        size=size,
        activation=_ACTIVATIONS[activation],
        gate_first=gate_first,
        epsilon=eps,
        x=_tensor(x),
        gate=c.NO_TENSOR if gate is None else _tensor(gate),
        weight=_tensor(weight),
        output=_tensor(output),
        rates=rate.data_ptr() if rates else 0,
    )
    c.require().run(RMS_NORM, packed)
    return output, rate


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
