"""Shifted multiply-adds in torch, in float32, rounded once: portable to every device torch has."""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.ops.causal_conv1d.problem import Convolution, Gradients
from fulmen.ops.causal_conv1d.reference import activated, last, slope, step, store_gradients_of_inputs

__all__ = ["backward", "forward", "step"]


def forward(p: Convolution, output: Tensor, state: Tensor | None) -> None:
    for part, tokens, row in p.sequences():
        u = part.inputs()
        output[:, tokens] = activated(before_activation(shifted(u, part), part), p.activation)
        if state is not None:
            state[row] = last(u, state.shape[2])


def backward(p: Convolution, grad_output: Tensor | None, grad_state: Tensor | None, grads: Gradients) -> None:
    for part, tokens, row in p.sequences():
        u = part.inputs()
        du = torch.zeros_like(u)
        if grad_output is not None:
            inputs, weight = shifted(u, part), p.weight.to(u.dtype)
            dz = grad_output[:, tokens] * slope(before_activation(inputs, part), p.activation)
            for j, into in enumerate(shifted(du, part)):
                into.addcmul_(dz, weight[:, j])
                if grads.weight is not None:
                    grads.weight[:, j].add_((dz * inputs[j]).sum((0, 1)))
            if grads.bias is not None:
                grads.bias.add_(dz.sum((0, 1)))
        if grad_state is not None:
            last(du, part.width).add_(grad_state[row])
        store_gradients_of_inputs(du, part.width, tokens, row, grads)


def shifted(u: Tensor, p: Convolution) -> list[Tensor]:
    """The inputs ``[B, N, C]`` that each of the K weights meets, of u ``[B, W + N, C]``; views."""
    taps, length = p.weight.shape[1], p.x.shape[1]
    first = p.width + 1 - taps
    return [u[:, first + j : first + j + length] for j in range(taps)]


def before_activation(inputs: list[Tensor], p: Convolution) -> Tensor:
    weight = p.weight.to(inputs[0].dtype)
    z = inputs[0] * weight[:, 0]
    if p.bias is not None:
        z += p.bias.to(z.dtype)
    for j, x in enumerate(inputs[1:], 1):
        z.addcmul_(x, weight[:, j])
    return z
