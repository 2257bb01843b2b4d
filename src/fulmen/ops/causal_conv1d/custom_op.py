"""The custom ops ``fulmen::causal_conv1d``, its gradient and its step: schema, results, and the way to a backend.

An op allocates its results with the same function that its fake uses, and hands them to the backend to fill.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fulmen.ops.causal_conv1d.problem import Convolution, ConvolutionBackend, Gradients, Step
from fulmen.runtime.gradients import allocated, by_input, requested, returned
from fulmen.runtime.library import define, define_gradient, without_gradient
from fulmen.runtime.operators import Operator
from fulmen.runtime.recording import note_update
from fulmen.runtime.tensors import state_dtype

OPERATOR = Operator(
    name="causal_conv1d",
    protocol=ConvolutionBackend,
    backends={
        "native": "fulmen.ops.causal_conv1d.native",
        "reference": "fulmen.ops.causal_conv1d.reference",
        "torch": "fulmen.ops.causal_conv1d.torch_shifted",
        "triton": "fulmen.ops.causal_conv1d.triton",
    },
    workloads="fulmen.lab.operators.causal_conv1d.workloads",
    checks="fulmen.lab.operators.causal_conv1d.checks",
    limits="fulmen.lab.operators.causal_conv1d.limits",
)
_backend: Callable[[str], ConvolutionBackend] = OPERATOR.backend
_SHARED = {"weight": 2, "bias": 1}


# ---- causal_conv1d ---------------------------------------------------------------------------------------------------


def _results(p: Convolution, return_state: bool) -> tuple[Tensor, Tensor]:
    # In the order of strides that x has: who hands in a transposed tensor transposes what comes back.
    return torch.empty_like(p.x), p.x.new_empty(p.state_shape if return_state else (0,))


def _new_gradients(p: Convolution, wanted: list[bool]) -> Gradients:
    def new(name: str, x: Tensor) -> Tensor:
        if name == "x":
            return torch.empty_like(x)
        if name == "initial_state":
            return x.new_empty(x.shape)
        return x.new_zeros(x.shape, dtype=state_dtype(p.x.dtype))

    return allocated(Gradients, p, wanted, new)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    *call, return_state, backend = args
    p = Convolution(*call)
    output, state = _results(p, return_state)
    _backend(backend).forward(p, output, state if return_state else None)
    return output, state


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    *call, return_state, _ = args
    return _results(Convolution(*call), return_state)


def _backward(grad_output: Tensor | None, grad_state: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    *call, wanted, backend = args
    p = Convolution(*call)
    grads = _new_gradients(p, wanted)
    _backend(backend).backward(p, grad_output, grad_state, grads)
    return returned(p, grads, p.x)


def _backward_fake(grad_output: Tensor | None, grad_state: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    *call, wanted, _ = args
    p = Convolution(*call)
    return returned(p, _new_gradients(p, wanted), p.x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *call, ctx.return_state, ctx.backend = inputs
    p = Convolution(*call)
    ctx.save_for_backward(p.x, p.weight, p.bias, p.initial_state, p.cu_seqlens)
    ctx.activation = p.activation
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad_output: Tensor | None, grad_state: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, bias, initial_state, cu_seqlens = ctx.saved_tensors
    p = Convolution(x, weight, bias, ctx.activation, initial_state, cu_seqlens)
    grad_state = grad_state if ctx.return_state else None
    wanted = requested(Gradients, p, ctx.needs_input_grad)
    grads = _causal_conv1d_backward(grad_output, grad_state, *p, wanted, ctx.backend)
    return *by_input(Gradients, p, wanted, grads), None, None


_ARGS = "Tensor x, Tensor weight, Tensor? bias, str? activation, Tensor? initial_state, Tensor? cu_seqlens"
define(
    f"causal_conv1d({_ARGS}, bool return_state, str backend) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    shared=_SHARED,
)
define(
    f"""causal_conv1d_backward(Tensor? grad_output, Tensor? grad_state, {_ARGS}, bool[] wanted,
    str backend) -> (Tensor, Tensor, Tensor, Tensor)""",
    _backward,
    _backward_fake,
    tensor=2,
    shared=_SHARED,
    gradients=Gradients._fields,
)
causal_conv1d = define_gradient("causal_conv1d", _gradient, _keep)
_causal_conv1d_backward = without_gradient("causal_conv1d_backward", "causal_conv1d")


# ---- causal_conv1d_step ----------------------------------------------------------------------------------------------


def _step(*args: Any) -> Tensor:
    p, backend = Step(*args[:-1]), args[-1]
    output = torch.empty_like(p.x)
    try:
        _backend(backend).step(p, output)
    finally:  # a warning that is an error comes when the state has been updated
        note_update(p.state)
    return output


def _step_fake(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x)


causal_conv1d_step = define(
    """causal_conv1d_step(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias, str? activation,
    str backend) -> Tensor""",
    _step,
    _step_fake,
    shared=_SHARED,
)
