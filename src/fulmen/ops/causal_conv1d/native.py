"""The CPU core's convolution (csrc/convolution.h): describes a call to it, and nothing else.

To the core every tensor is ``[B, tokens, C]``, a state and a weight too, and any strides will do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.ops.causal_conv1d.problem import Convolution, Gradients, Step
from fulmen.ops.chunks.sequences import packed_bounds
from fulmen.runtime import core as c
from fulmen.runtime.core_structs import (
    CAUSAL_CONV1D_BACKWARD,
    CAUSAL_CONV1D_FORWARD,
    CAUSAL_CONV1D_PROBLEM,
    CAUSAL_CONV1D_STEP,
    CODES,
    TENSOR,
    Struct,
    Words,
)

_ACTIVATIONS = {None: CODES["IDENTITY"], "silu": CODES["SILU"]}


def forward(p: Convolution, output: Tensor, state: Tensor | None) -> None:
    _run(p, CAUSAL_CONV1D_FORWARD, output=c.tensor(output), final_state=_state(state))


def backward(p: Convolution, grad_output: Tensor | None, grad_state: Tensor | None, grads: Gradients) -> None:
    _run(
        p,
        CAUSAL_CONV1D_BACKWARD,
        grad_output=c.tensor(grad_output),
        grad_state=_state(grad_state),
        dx=c.tensor(grads.x),
        dinitial=_state(grads.initial_state),
        dweight=_weight(grads.weight),
        dbias=_bias(grads.bias),
    )


def step(p: Step, output: Tensor) -> None:
    weight, bias = _readable(p.weight), None if p.bias is None else _readable(p.bias)
    batch, channels, state_width = p.state.shape
    packed = CAUSAL_CONV1D_STEP.pack(
        header=c.header(CAUSAL_CONV1D_STEP),
        batch=batch,
        channels=channels,
        width=weight.shape[1],
        state_width=state_width,
        activation=_ACTIVATIONS[p.activation],
        x=_token(p.x),
        state=_state(p.state),
        weight=_weight(weight),
        bias=_bias(bias),
        output=_token(output),
    )
    c.require().run(CAUSAL_CONV1D_STEP, packed)


def _run(p: Convolution, call: Struct, **fields: Words) -> None:
    batch, length, channels = p.x.shape
    weight, bias = _readable(p.weight), None if p.bias is None else _readable(p.bias)
    bounds = None if p.cu_seqlens is None else p.cu_seqlens.to(torch.int64).contiguous()
    problem = CAUSAL_CONV1D_PROBLEM.words(
        header=c.header(call),
        batch=batch,
        tokens=length,
        channels=channels,
        width=p.weight.shape[1],
        state_width=p.width,
        sequences=0 if bounds is None else bounds.shape[0] - 1,
        cu_seqlens=0 if bounds is None else bounds.data_ptr(),
        activation=_ACTIVATIONS[p.activation],
        x=c.tensor(p.x),
        weight=_weight(weight),
        bias=_bias(bias),
        initial_state=_state(p.initial_state),
    )
    try:
        c.require().run(call, call.pack(problem=problem, **fields))
    except c.RefusedError as error:
        if error.status == CODES["BAD_SEQUENCES"] and bounds is not None:
            packed_bounds(bounds, length)  # says what is wrong with cu_seqlens
        raise


def _readable(x: Tensor) -> Tensor:
    """A weight or bias as the core can read it: no float64."""
    return x.float() if x.dtype is torch.float64 else x


def _state(x: Tensor | None) -> Words:
    """``[B, C, W]``."""
    return c.NO_TENSOR if x is None else _words(x, x.stride(0), x.stride(2), x.stride(1))


def _weight(x: Tensor | None) -> Words:
    """``[C, K]``."""
    return c.NO_TENSOR if x is None else _words(x, 0, x.stride(1), x.stride(0))


def _bias(x: Tensor | None) -> Words:
    """``[C]``."""
    return c.NO_TENSOR if x is None else _words(x, 0, 0, x.stride(0))


def _token(x: Tensor) -> Words:
    """``[B, C]``."""
    return _words(x, x.stride(0), 0, x.stride(1))


def _words(x: Tensor, batch: int, token: int, channel: int) -> Words:
    return TENSOR.words(
        data=x.data_ptr(), dtype=c.DTYPES[x.dtype], stride_batch=batch, stride_token=token, stride_head=channel
    )
