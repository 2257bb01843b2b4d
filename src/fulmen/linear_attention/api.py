"""The public functions: signature, documentation, checks, and one call."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from fulmen.backends import choose
from fulmen.linear_attention import ops  # noqa: F401  (registers torch.ops.fulmen.*)
from fulmen.linear_attention.validation import check_attention, check_states, check_step
from fulmen.tensors import autocast

# Looked up once: the three attributes on the way take a microsecond.
_attention = torch.ops.fulmen.linear_attention.default
_step = torch.ops.fulmen.linear_attention_step.default
_states = torch.ops.fulmen.chunk_states.default

# Longer than any N, and such that N + chunk_size fits 64 bits. (N itself as the limit would fix it in torch.export.)
_LONGEST_CHUNK = 1 << 62


@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: Tensor | None = ...,
    decay_v: Tensor | None = ...,
    scale: float = ...,
    initial_state: Tensor | None = ...,
    return_state: Literal[False] = ...,
    cu_seqlens: Tensor | None = ...,
    schedule: str = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: Tensor | None = ...,
    decay_v: Tensor | None = ...,
    scale: float = ...,
    initial_state: Tensor | None = ...,
    return_state: Literal[True],
    cu_seqlens: Tensor | None = ...,
    schedule: str = ...,
    backend: str = ...,
) -> tuple[Tensor, Tensor]: ...


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: Tensor | None = None,
    decay_v: Tensor | None = None,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    schedule: str = "auto",
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal linear attention with any decay::

        S_t = diag(exp(a_t)) S_{t-1} diag(exp(c_t)) + k_t v_tᵀ          a = decay, c = decay_v
        o_t = scale · q_tᵀ S_t

    The cost is linear in N. Gradients flow to every tensor argument, from the output and from the final state.

    Args:
        q: ``[B, N, Hq, D]``; float32, bfloat16, float16 or float64. D and E may be 1 to 512.
        k: ``[B, N, Hk, D]``, dtype of q.
        v: ``[B, N, Hv, E]``, dtype of q. H is the largest of Hq, Hk, Hv; each divides it, and head h reads head
            ``h // (H / Hx)`` of a tensor with Hx heads.
        decay: natural logarithm of the decay of the key axis, any float dtype, at most 0; -inf forgets the state.
            ``[H]`` is constant, ``[B, N, H]`` per token, ``[B, N, H, D]`` per token and channel. None: no decay.
        decay_v: the same for the value axis, ``[B, N, H, E]``.
        scale: factor of the output.
        initial_state: S_0, ``[B, H, D, E]`` (``[sequences, H, D, E]`` with cu_seqlens), float32 (float64 for float64
            inputs). None: zeros.
        return_state: also return the final state.
        cu_seqlens: ``[sequences + 1]``, int32 or int64: where each of several sequences packed along N starts, and N.
            B must be 1. Sequences may be empty. Each has its own initial and final state. On a GPU its values are not
            checked, as that would wait for the device; tokens behind the last sequence get zeros there.
        schedule: "recurrent", "loop", "parallel", "recompute" or "auto"; see ``docs/linear_attention.md``.
        backend: a name from :func:`fulmen.backends`, or "auto".

    Returns:
        The output ``[B, N, H, E]`` in q's dtype; with ``return_state=True`` a pair of it and the final state, shaped
        and typed like ``initial_state``.

    Raises:
        TypeError, ValueError: before any work, naming the argument, what it was and what it must be.
    """
    q, k, v = autocast(q, k, v)
    check_attention(q, k, v, decay, decay_v, scale, initial_state, return_state, cu_seqlens, schedule)
    backend = choose(backend, q.device, q.dtype)
    output, state = _attention(
        q, k, v, decay, decay_v, float(scale), initial_state, cu_seqlens, schedule, return_state, backend
    )
    return (output, state) if return_state else output


def linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    decay: Tensor | None = None,
    decay_v: Tensor | None = None,
    scale: float = 1.0,
    backend: str = "auto",
) -> Tensor:
    """One token of :func:`linear_attention`, for decoding: updates ``state`` in place and returns the token's output.

    Args:
        q: ``[B, Hq, D]``. k: ``[B, Hk, D]``. v: ``[B, Hv, E]``. Heads are shared as in :func:`linear_attention`.
        state: ``[B, H, D, E]``, float32 (float64 for float64 inputs). Any view that is dense along D or along E, such
            as the transpose of a cache ``[B, H, E, D]``, is updated where it is.
        decay: ``[H]``, ``[B, H]`` or ``[B, H, D]``; decay_v: ``[B, H, E]``. Natural logarithms.
        scale: factor of the output.
        backend: a name from :func:`fulmen.backends`, or "auto".

    Returns:
        ``[B, H, E]`` in q's dtype.

    Raises:
        TypeError, ValueError: before any work; the state is then as it was. Also if grad is enabled and an input
            requires it: an update in place has no gradient.
    """
    q, k, v = autocast(q, k, v)
    check_step(q, k, v, state, decay, decay_v, scale)
    backend = choose(backend, q.device, q.dtype)
    return _step(q, k, v, state, decay, decay_v, float(scale), backend)


def chunk_states(
    k: Tensor,
    v: Tensor,
    *,
    decay: Tensor | None = None,
    decay_v: Tensor | None = None,
    initial_state: Tensor | None = None,
    chunk_size: int = 128,
    schedule: str = "auto",
    backend: str = "auto",
) -> Tensor:
    """The states of :func:`linear_attention` at the borders of chunks, differentiable in every tensor argument.

    Args:
        k: ``[B, N, Hk, D]``. v: ``[B, N, Hv, E]``.
        decay: ``[H]``, ``[B, N, H]`` or ``[B, N, H, D]``; decay_v: ``[B, N, H, E]``. H is the largest number of heads
            of k, v and the decays.
        initial_state: ``[B, H, D, E]``, float32 (float64 for float64 inputs).
        chunk_size: tokens per chunk; the last chunk may be shorter.
        schedule: "loop" walks the chunks one by one, "parallel" computes all their contributions first.
        backend: a name from :func:`fulmen.backends`, or "auto".

    Returns:
        ``[B, H, ceil(N / chunk_size) + 1, D, E]``, float32 (float64 for float64 inputs): the state that enters each
        chunk, and the final one last.
    """
    k, v = autocast(k, v)
    check_states(k, v, decay, decay_v, initial_state, chunk_size, schedule)
    backend = choose(backend, k.device, k.dtype)
    return _states(k, v, decay, decay_v, initial_state, min(int(chunk_size), _LONGEST_CHUNK), schedule, backend)
