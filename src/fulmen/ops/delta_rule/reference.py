"""The specification: the recurrence, token by token, as a person would write it.

    S'_t = diag(exp(a_t)) S_{t-1}       the decay
    y_t  = v_t - S'_tᵀ k_t              what the state says of v_t is wrong by this much
    S_t  = S'_t + k_t (β_t y_t)ᵀ
    o_t  = scale · q_tᵀ S_t

Every other backend is tested against this file in float64; :func:`backward` is the gradient written as a recurrence.
Reductions are elementwise products and sums, never matmuls: a result does not depend on the batch around it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fulmen.ops.chunks.decay_form import DecayForm, as_sequence
from fulmen.ops.chunks.sequences import new_state, share_heads, sum_shared_heads
from fulmen.ops.delta_rule.problem import DeltaRule, Gradients, Step, normalized, normalized_backward
from fulmen.runtime.tensors import state_dtype


class Operands(NamedTuple):
    """In the state's dtype, with the call's number of heads; q and k are normalized if that is requested."""

    q: Tensor  # [B, N, H, D]
    k: Tensor
    v: Tensor  # [B, N, H, E]
    beta: Tensor  # [B, N, H, 1]
    a: Tensor | None  # [B, N, H, D] or [B, N, H, 1]


def decayed(state: Tensor, a: Tensor | None, t: int) -> Tensor:
    return state if a is None else a[:, t].exp()[..., :, None] * state


def correction(state: Tensor, x: Operands, t: int) -> Tensor:
    """y ``[B, H, E]`` of token t, whose decay ``state`` has had."""
    return x.v[:, t] - (state * x.k[:, t, :, :, None]).sum(-2)


def updated(state: Tensor, x: Operands, t: int) -> Tensor:
    return state + x.k[:, t, :, :, None] * (x.beta[:, t] * correction(state, x, t))[..., None, :]


def states_of(x: Operands, state: Tensor) -> list[Tensor]:
    """S_0 to S_N, each ``[B, H, D, E]``, from S_0 = ``state``."""
    states = [state]
    for t in range(x.k.shape[1]):
        states.append(updated(decayed(states[-1], x.a, t), x, t))
    return states


def read_out(q: Tensor, states: list[Tensor], scale: float) -> Tensor:
    """The outputs ``[B, N, H, E]``: each token reads the state that already holds it."""
    outputs = [scale * (q[:, t, :, :, None] * states[t + 1]).sum(-2) for t in range(q.shape[1])]
    return torch.stack(outputs, 1) if outputs else q.new_zeros(*q.shape[:3], states[0].shape[-1])


def forward(p: DeltaRule, output: Tensor, state: Tensor | None) -> None:
    for part, tokens, row in p.sequences():
        x = operands(part)
        states = states_of(x, new_state(part.initial_state, part.state_shape, x.k))
        output[:, tokens] = read_out(x.q, states, part.scale)
        if state is not None:
            state[row] = states[-1]


def backward(p: DeltaRule, grad_output: Tensor | None, grad_state: Tensor | None, grads: Gradients) -> None:
    for part, tokens, row in p.sequences():
        do = None if grad_output is None else grad_output[:, tokens]
        dstate = None if grad_state is None else grad_state[row]
        backward_sequence(part, do, dstate, grads.select(tokens, row))


def backward_sequence(p: DeltaRule, grad_output: Tensor | None, grad_state: Tensor | None, grads: Gradients) -> None:
    """With G_t the whole gradient of S_t, from the last token to the first:

    G_t    = scale · q_t do_tᵀ + diag(exp(a_{t+1})) G'_{t+1}                  G beyond the end is ``grad_state``
    du_t   = G_tᵀ k_t      dv_t = β_t du_t      dβ_t = du_t · y_t
    G'_t   = G_t - k_t dv_tᵀ                    the gradient of S'_t
    dk_t   = β_t G_t y_t - S'_t dv_t
    da_t   = row sums of G'_t ⊙ S'_t
    """
    x = operands(p)
    states = states_of(x, new_state(p.initial_state, p.state_shape, x.k))
    do = torch.zeros_like(x.v) if grad_output is None else p.scale * grad_output.to(x.v.dtype)
    dq, dk, dv, dbeta, da = (torch.zeros_like(tensor) for tensor in (x.q, x.k, x.v, x.beta, x.k))
    g = new_state(grad_state, p.state_shape, x.k)
    for t in reversed(range(x.k.shape[1])):
        k, beta = x.k[:, t], x.beta[:, t]
        dq[:, t] = (states[t + 1] * do[:, t, :, None, :]).sum(-1)
        g = g + x.q[:, t, :, :, None] * do[:, t, :, None, :]
        before = decayed(states[t], x.a, t)
        y = correction(before, x, t)
        du = (g * k[..., None]).sum(-2)
        dv[:, t], dbeta[:, t] = beta * du, (du * y).sum(-1, keepdim=True)
        dk[:, t] = (g * (beta * y)[..., None, :]).sum(-1) - (before * dv[:, t, :, None, :]).sum(-1)
        g = g - k[..., None] * dv[:, t, :, None, :]
        da[:, t] = (g * before).sum(-1)
        g = decayed(g, x.a, t)
    if p.normalize_qk:
        dq, dk = (through_normalization(*pair, p.heads) for pair in ((dq, p.q), (dk, p.k)))
    for into, gradient in ((grads.q, dq), (grads.k, dk), (grads.v, dv)):
        if into is not None:
            into.copy_(sum_shared_heads(gradient, into.shape[2]))
    if grads.beta is not None:
        grads.beta.copy_(dbeta[..., 0])
    if grads.log_decay is not None:
        grads.log_decay.add_(DecayForm.of(grads.log_decay).reduced(da))
    if grads.initial_state is not None:
        grads.initial_state.copy_(g)


def step(p: Step, output: Tensor) -> None:
    q, k, v, beta = (tensor[:, None] for tensor in (p.q, p.k, p.v, p.beta))
    sequence = DeltaRule(q, k, v, beta, as_sequence(p.log_decay), p.normalize_qk, p.scale, None, None, "auto")
    x = operands(sequence)
    states = states_of(x, p.state)
    p.state.copy_(states[1])
    output.copy_(read_out(x.q, states, p.scale)[:, 0])


def operands(p: DeltaRule) -> Operands:
    dtype = state_dtype(p.k.dtype)
    q, k, v = (share_heads(x, p.heads).to(dtype) for x in (p.q, p.k, p.v))
    if p.normalize_qk:
        (q, _), (k, _) = normalized(q), normalized(k)
    a = None if p.log_decay is None else DecayForm.of(p.log_decay).by_token(p.log_decay, k)
    return Operands(q, k, v, p.beta[..., None].to(dtype), a)


def through_normalization(gradient: Tensor, x: Tensor, heads: int) -> Tensor:
    return normalized_backward(gradient, *normalized(share_heads(x, heads)))
