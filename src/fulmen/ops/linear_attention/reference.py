"""The specification: the recurrence, token by token, as a person would write it.

    S_t = diag(exp(a_t)) S_{t-1} diag(exp(c_t)) + k_t v_tᵀ
    o_t = scale · q_tᵀ S_t

Every other backend is tested against this file in float64. :func:`states_of` and :func:`read_out` are ordinary torch
operations, so autograd can differentiate them; :func:`backward` is that gradient written as a recurrence.
Reductions are elementwise products and sums, never matmuls: a result does not depend on the batch around it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fulmen.ops.chunks.decay_form import DecayForm, as_sequence
from fulmen.ops.chunks.sequences import new_state, share_heads, sum_shared_heads
from fulmen.ops.linear_attention.problem import Attention, Gradients, States, Step
from fulmen.runtime.tensors import state_dtype


def decayed(state: Tensor, a: Tensor | None, c: Tensor | None) -> Tensor:
    """``diag(exp(a)) · state · diag(exp(c))``; ``a`` is ``[..., D]`` or ``[..., 1]``, ``c`` is ``[..., E]``."""
    if a is not None:
        state = a.exp()[..., :, None] * state
    if c is not None:
        state = state * c.exp()[..., None, :]
    return state


def outer(k: Tensor, v: Tensor) -> Tensor:
    return k[..., :, None] * v[..., None, :]


def states_of(k: Tensor, v: Tensor, a: Tensor | None, c: Tensor | None, state: Tensor) -> list[Tensor]:
    """S_0 to S_N, each ``[B, H, D, E]``, for ``k`` ``[B, N, H, D]`` and ``v`` ``[B, N, H, E]`` from S_0 = ``state``."""
    states = [state]
    for t in range(k.shape[1]):
        states.append(decayed(states[-1], at(a, t), at(c, t)) + outer(k[:, t], v[:, t]))
    return states


def read_out(q: Tensor, states: list[Tensor], scale: float) -> Tensor:
    """The outputs ``[B, N, H, E]``: each token reads the state that already holds it."""
    outputs = [scale * (q[:, t, :, :, None] * states[t + 1]).sum(-2) for t in range(q.shape[1])]
    return torch.stack(outputs, 1) if outputs else q.new_zeros(*q.shape[:3], states[0].shape[-1])


def forward(p: Attention, output: Tensor, state: Tensor | None) -> None:
    for part, tokens, row in p.sequences():
        k, v, a, c = operands(part)
        states = states_of(k, v, a, c, new_state(part.initial_state, part.state_shape, k))
        output[:, tokens] = read_out(share_heads(part.q, part.heads), states, part.scale)
        if state is not None:
            state[row] = states[-1]


def backward(p: Attention, grad_output: Tensor | None, grad_state: Tensor | None, grads: Gradients) -> None:
    for part, tokens, row in p.sequences():
        k, v, a, c = operands(part)
        q = share_heads(part.q, part.heads).to(k.dtype)
        do = torch.zeros_like(v) if grad_output is None else part.scale * grad_output[:, tokens].to(v.dtype)
        states = states_of(k, v, a, c, new_state(part.initial_state, part.state_shape, k))
        dq = torch.zeros_like(q)
        for t in range(q.shape[1]):
            dq[:, t] = (states[t + 1] * do[:, t, :, None, :]).sum(-1)
        into = grads.select(tokens, row)
        if into.q is not None:
            into.q.copy_(sum_shared_heads(dq, into.q.shape[2]))

        def gradient_into(t: int, q: Tensor = q, do: Tensor = do) -> Tensor:
            return outer(q[:, t], do[:, t])

        last = new_state(None if grad_state is None else grad_state[row], part.state_shape, k)
        state_gradients(k, v, a, c, states, last, gradient_into, into)


def states_forward(p: States, states: Tensor) -> None:
    k, v, a, c = operands(p)
    every = states_of(k, v, a, c, new_state(p.initial_state, states[:, :, 0].shape, k))
    states.copy_(torch.stack(every[: -1 : p.chunk_size] + every[-1:], 2))


def states_backward(p: States, states: Tensor, grad_states: Tensor, grads: Gradients) -> None:
    k, v, a, c = operands(p)
    every = states_of(k, v, a, c, states[:, :, 0])

    def gradient_into(t: int) -> Tensor | None:
        chunk, offset = divmod(t + 1, p.chunk_size)
        return grad_states[:, :, chunk] if offset == 0 and t + 1 < k.shape[1] else None

    state_gradients(k, v, a, c, every, grad_states[:, :, -1], gradient_into, grads)
    if grads.initial_state is not None and k.shape[1] > 0:
        grads.initial_state.add_(grad_states[:, :, 0])


def state_gradients(
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    c: Tensor | None,
    states: list[Tensor],
    last: Tensor,
    gradient_into: Callable[[int], Tensor | None],
    grads: Gradients,
) -> None:
    """Fill what is requested, but not q. With G_t the whole gradient of S_t, from the last token to the first:

    G_t  = gradient_into(t) + diag(exp(a_{t+1})) G_{t+1} diag(exp(c_{t+1}))       G beyond the end is ``last``
    dk_t = G_t v_t      dv_t = G_tᵀ k_t
    da_t, dc_t = row and column sums of G_t ⊙ (diag(exp(a_t)) S_{t-1} diag(exp(c_t)))
    """
    dk, dv, da, dc = (torch.zeros_like(x) for x in (k, v, k, v))
    g = last
    for t in reversed(range(k.shape[1])):
        direct = gradient_into(t)
        g = g if direct is None else g + direct
        dk[:, t] = (g * v[:, t, :, None, :]).sum(-1)
        dv[:, t] = (g * k[:, t, :, :, None]).sum(-2)
        through_decay = g * decayed(states[t], at(a, t), at(c, t))
        da[:, t] = through_decay.sum(-1)
        dc[:, t] = through_decay.sum(-2)
        g = decayed(g, at(a, t), at(c, t))
    if grads.k is not None:
        grads.k.copy_(sum_shared_heads(dk, grads.k.shape[2]))
    if grads.v is not None:
        grads.v.copy_(sum_shared_heads(dv, grads.v.shape[2]))
    grads.add_decay(da, dc)
    if grads.initial_state is not None:
        grads.initial_state.copy_(g)


def step(p: Step, output: Tensor) -> None:
    heads, dtype = p.state.shape[1], state_dtype(p.state.dtype)
    q, k, v = (share_heads(x[:, None], heads).to(dtype) for x in (p.q, p.k, p.v))
    a, c = token_decay(as_sequence(p.log_decay), k), token_decay(as_sequence(p.log_decay_v), v)
    states = states_of(k, v, a, c, p.state)
    p.state.copy_(states[1])
    output.copy_(read_out(q, states, p.scale)[:, 0])


def operands(p: Attention | States) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """k, v and both decays in the state's dtype, with the call's number of heads, log-decays as ``[B, N, H, ·]``."""
    dtype = state_dtype(p.k.dtype)
    k, v = (share_heads(x, p.heads).to(dtype) for x in (p.k, p.v))
    return k, v, token_decay(p.log_decay, k), token_decay(p.log_decay_v, v)


def token_decay(log_decay: Tensor | None, like: Tensor) -> Tensor | None:
    """A log-decay of any form as ``[B, N, H, D]`` or ``[B, N, H, 1]``."""
    return None if log_decay is None else DecayForm.of(log_decay).by_token(log_decay, like)


def at(x: Tensor | None, t: int) -> Tensor | None:
    return None if x is None else x[:, t]
