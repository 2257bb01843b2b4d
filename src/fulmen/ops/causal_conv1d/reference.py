"""The specification: token by token, as a person would write it. Every other backend is tested against this file in
float64.

    z_t = bias + Σ_j weight_j u_{t-K+1+j}     y_t = activation(z_t)     u: the initial state and then x

and its gradient, with dz_t = dy_t · activation'(z_t):

    du_{t-K+1+j} += weight_j dz_t     dweight_j += Σ_t dz_t u_{t-K+1+j}     dbias += Σ_t dz_t
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from fulmen.ops.causal_conv1d.problem import Convolution, Gradients, Step
from fulmen.runtime.tensors import state_dtype


def forward(p: Convolution, output: Tensor, state: Tensor | None) -> None:
    for part, tokens, row in p.sequences():
        u = part.inputs()
        for t, window in enumerate(windows(u, part)):
            output[:, tokens][:, t] = activated(weighed(window, p), p.activation)
        if state is not None:
            state[row] = last(u, state.shape[2])


def backward(p: Convolution, grad_output: Tensor | None, grad_state: Tensor | None, grads: Gradients) -> None:
    for part, tokens, row in p.sequences():
        u = part.inputs()
        du = torch.zeros_like(u)
        if grad_output is not None:
            for t, (window, into) in enumerate(zip(windows(u, part), windows(du, part), strict=True)):
                dz = grad_output[:, tokens][:, t] * slope(weighed(window, p), p.activation)
                into += dz[:, None] * p.weight.T.to(u.dtype)
                if grads.weight is not None:
                    grads.weight.add_((dz[:, None] * window).sum(0).T)
                if grads.bias is not None:
                    grads.bias.add_(dz.sum(0))
        if grad_state is not None:
            last(du, part.width).add_(grad_state[row])
        store_gradients_of_inputs(du, part.width, tokens, row, grads)


def store_gradients_of_inputs(du: Tensor, width: int, tokens: slice, row: slice, grads: Gradients) -> None:
    """du ``[B, W + N, C]`` to where the initial state and x have come from."""
    if grads.x is not None:
        grads.x[:, tokens] = du[:, width:]
    if grads.initial_state is not None:
        grads.initial_state[row] = du[:, :width].transpose(1, 2)


def step(p: Step, output: Tensor) -> None:
    u = torch.cat((p.state, p.x[:, :, None]), 2).transpose(1, 2).to(state_dtype(p.x.dtype))
    output.copy_(activated(weighed(u[:, u.shape[1] - p.weight.shape[1] :], p), p.activation))
    p.state.copy_(last(u, p.state.shape[2]))


def windows(u: Tensor, p: Convolution) -> list[Tensor]:
    """For each token the K inputs ``[B, K, C]`` that it reads, of u ``[B, W + N, C]``; views."""
    taps = p.weight.shape[1]
    return [u[:, t - taps : t] for t in range(p.width + 1, u.shape[1] + 1)]


def weighed(window: Tensor, p: Convolution | Step) -> Tensor:
    """z ``[B, C]`` of one token."""
    z = (window * p.weight.T.to(window.dtype)).sum(1)
    return z if p.bias is None else z + p.bias.to(z.dtype)


def last(u: Tensor, width: int) -> Tensor:
    """The last W inputs of u ``[B, W + N, C]`` as a state ``[B, C, W]``; a view."""
    return u[:, u.shape[1] - width :].transpose(1, 2)


def activated(z: Tensor, activation: str | None) -> Tensor:
    return silu(z) if activation == "silu" else z


def slope(z: Tensor, activation: str | None) -> Tensor:
    """The derivative of the activation at z."""
    if activation is None:
        return torch.ones_like(z)
    sigmoid = z.sigmoid()
    return sigmoid * (1 + z * (1 - sigmoid))
