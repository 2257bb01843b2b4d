"""RMSNorm, with or without a gate.

    y = weight · n ⊙ act(gate),   n = x / sqrt(mean(x²) + eps)          the gate after the norm
    y = weight · n,               n of x ⊙ act(gate)                    the gate first

torch's own rms_norm is a chain of elementwise functions on a CPU, each of which autograd keeps: here forward and
backward are written out, and keep x, gate and one number for each row; each is one call of the CPU core where that
takes it (:mod:`fulmen.nn.native_norm`). A compiler fuses the formula better than that. With groups x, gate and
weight come as ``[..., groups, size]``; what is a row is the last dimension all the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import sigmoid, silu

from fulmen.nn import native_norm
from fulmen.nn.mixer import check_heads
from fulmen.runtime.checks import check_choice, check_count
from fulmen.runtime.replay import replayed
from fulmen.runtime.tensors import at_least_float32

ACTIVATIONS = {"silu": silu, "sigmoid": sigmoid}


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension, computed in float32 (float64 for float64 inputs).

    Args:
        size: of the last dimension.
        eps: is added to the mean of squares.
        gate: "silu" or "sigmoid" of a second argument of forward is a factor; None: there is none.
        gate_first: what is normalised is x times the gate, as in Mamba-2.
        groups: of ``size / groups`` channels, each normalised by itself.
    """

    def __init__(
        self, size: int, eps: float = 1e-5, *, gate: str | None = None, gate_first: bool = False, groups: int = 1
    ) -> None:
        super().__init__()
        check_count("size", size)
        check_count("groups", groups)
        check_heads(size=size, groups=groups)
        if gate is not None:
            check_choice("gate", gate, tuple(ACTIVATIONS))
        self.size, self.eps, self.gate, self.gate_first, self.groups = size, eps, gate, gate_first, groups
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """x and gate ``[..., size]``; the result has x's dtype."""
        if (gate is None) != (self.gate is None):
            raise ValueError(
                f"gate must be {'None' if self.gate is None else 'a tensor'} here; got {type(gate).__name__}"
            )
        options = self.eps, self.gate, self.gate_first
        if self.groups == 1:
            return rms_norm(x, gate, self.weight, *options)
        groups = (self.groups, -1)
        gate = None if gate is None else gate.unflatten(-1, groups)
        return rms_norm(x.unflatten(-1, groups), gate, self.weight.unflatten(-1, groups), *options).flatten(-2)

    def extra_repr(self) -> str:
        gate = "" if self.gate is None else f", gate={self.gate}{' first' if self.gate_first else ''}"
        groups = "" if self.groups == 1 else f", groups={self.groups}"
        return f"{self.size}, eps={self.eps}{gate}{groups}"


@replayed
def rms_norm(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, activation: str | None, gate_first: bool
) -> Tensor:
    """The norm as a function; the result has x's dtype."""
    options = eps, activation, gate_first
    compiling, differentiated = torch.compiler.is_compiling(), torch.is_grad_enabled()
    if not compiling and native_norm.takes(x, gate, weight):
        if not differentiated:
            return native_norm.rms_norm(x, gate, weight, *options, False)[0]
        result: Tensor = _Norm.apply(x, gate, weight, *options)[0]
        return result
    tensors = at_least_float32(x), None if gate is None else at_least_float32(gate), at_least_float32(weight)
    if compiling:
        return formula(*tensors, *options).to(x.dtype)
    compute: Any = _Norm.apply if differentiated else _forward
    return compute(*tensors, *options)[0].to(x.dtype)


def formula(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, activation: str | None, gate_first: bool
) -> Tensor:
    factor = None if gate is None or activation is None else ACTIVATIONS[activation](gate)
    if factor is not None and gate_first:
        x = x * factor
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    return y if factor is None or gate_first else y * factor


def _forward(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, activation: str | None, gate_first: bool
) -> tuple[Tensor, Tensor]:
    """The result, and what each row was multiplied by."""
    if native_norm.takes(x, gate, weight):
        return native_norm.rms_norm(x, gate, weight, eps, activation, gate_first, True)
    factor = None if gate is None or activation is None else ACTIVATIONS[activation](gate)
    own = factor.mul_(x) if factor is not None and gate_first else None  # what may be overwritten
    normed = x if own is None else own
    norm = torch.linalg.vector_norm(normed, dim=-1, keepdim=True)
    # norm² / size + eps in one function
    least = torch.scalar_tensor(eps, dtype=x.dtype, device=x.device)
    rate = torch.addcmul(least, norm, norm, value=1 / x.shape[-1]).rsqrt_()
    y = (x * rate if own is None else own.mul_(rate)).mul_(weight)
    return (y if factor is None or gate_first else y.mul_(factor)), rate


class _Norm(torch.autograd.Function):
    forward = staticmethod(_forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, gate, weight, _, ctx.activation, ctx.gate_first = inputs
        _, rate = output
        ctx.mark_non_differentiable(rate)
        ctx.save_for_backward(x, gate, weight, rate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, rate = ctx.saved_tensors
        gradients = native_norm.gradients if native_norm.takes_gradient(dy, x, gate, weight) else _gradients
        of_weight = ctx.needs_input_grad[2]
        return *gradients(dy, x, gate, weight, rate, ctx.activation, ctx.gate_first, of_weight), None, None, None


def _gradients(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    rate: Tensor,
    activation: str | None,
    gate_first: bool,
    of_weight: bool,
) -> tuple[Tensor | None, ...]:
    """Of x, gate and weight."""
    if gate is None or activation is None:
        dx, dweight = _backward(dy, x, rate, weight)
        return dx, None, dweight
    factor = ACTIVATIONS[activation](gate)
    if gate_first:
        dnormed, dweight = _backward(dy, x * factor, rate, weight)
        dgate = _through(activation, x * dnormed, gate, factor)
        dx = dnormed.mul_(factor)
    else:
        dgate = _through(activation, (x * rate).mul_(weight).mul_(dy), gate, factor)
        dx, dweight = _backward(factor.mul_(dy), x, rate, weight)
    return dx, dgate, dweight


def _backward(dy: Tensor, x: Tensor, rate: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight through ``weight · x · rate``."""
    n = x * rate
    product = dy * n
    dweight = product.reshape(-1, *weight.shape).sum(0)
    mean = torch.einsum("...c,...c->...", product, weight).unsqueeze(-1) / x.shape[-1]  # of dy · weight · n, over a row
    dx = torch.mul(dy, weight, out=product).sub_(n.mul_(mean)).mul_(rate)
    return dx, dweight


def _through(activation: str, grad: Tensor, gate: Tensor, factor: Tensor) -> Tensor:
    """The gradient of ``gate``, given that of ``factor``, its activation."""
    if activation == "silu":
        return torch.ops.aten.silu_backward(grad, gate)
    return torch.ops.aten.sigmoid_backward(grad, factor)
