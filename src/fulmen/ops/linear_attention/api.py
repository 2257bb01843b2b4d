"""The public functions: signature, documentation, checks, and one call."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from fulmen.ops.linear_attention import custom_op
from fulmen.ops.linear_attention.validation import check_attention, check_states, check_step
from fulmen.runtime.backends import choose
from fulmen.runtime.replay import replayed
from fulmen.runtime.tensors import autocast, factor, in_state_dtype

# Longer than any N, and such that N + chunk_size fits 64 bits. (N itself as the limit would fix it in torch.export.)
_LONGEST_CHUNK = 1 << 62


@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = ...,
    log_decay_v: Tensor | None = ...,
    scale: float | None = ...,
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
    log_decay: Tensor | None = ...,
    log_decay_v: Tensor | None = ...,
    scale: float | None = ...,
    initial_state: Tensor | None = ...,
    return_state: Literal[True],
    cu_seqlens: Tensor | None = ...,
    schedule: str = ...,
    backend: str = ...,
) -> tuple[Tensor, Tensor]: ...


@replayed
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    log_decay_v: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    schedule: str = "auto",
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal linear attention with any decay::

        S_t = diag(exp(a_t)) S_{t-1} diag(exp(c_t)) + k_t v_tᵀ          a = log_decay, c = log_decay_v
        o_t = scale · q_tᵀ S_t

    The cost is linear in N. Gradients flow to every tensor argument, from the output and from the final state.

    Args:
        q: ``[B, N, Hq, D]``; float32, bfloat16, float16 or float64. D and E may be 1 to 512.
        k: ``[B, N, Hk, D]``, dtype of q.
        v: ``[B, N, Hv, E]``, dtype of q. H is the largest of Hq, Hk, Hv; each divides it, and head h reads head
            ``h // (H / Hx)`` of a tensor with Hx heads.
        log_decay: natural logarithm of the decay of the key axis, any float dtype, at most 0; -inf forgets the state.
            One per head ``[H]``, per token ``[B, N, H]``, or per channel ``[B, N, H, D]``. None: no decay.
        log_decay_v: the same for the value axis, per channel ``[B, N, H, E]``.
        scale: factor of the output. None: ``D ** -0.5``.
        initial_state: S_0, ``[B, H, D, E]`` (``[sequences, H, D, E]`` with cu_seqlens), any float dtype. None: zeros.
        return_state: also return the final state.
        cu_seqlens: ``[sequences + 1]``, int32 or int64: where each of several sequences packed along N starts, and N.
            B must be 1. Sequences may be empty. Each has its own initial and final state. On a GPU its values are not
            checked, as that would wait for the device; tokens after the last sequence get zeros there.
        schedule: "recurrent", "loop", "parallel", "recompute" or "auto"; see ``docs/linear_attention.md``.
        backend: a name from :func:`fulmen.backends`, or "auto".

    Returns:
        The output ``[B, N, H, E]`` in q's dtype; with ``return_state=True`` a pair of it and the final state, shaped
        like ``initial_state``, float32 (float64 for float64 inputs).

    Raises:
        TypeError, ValueError: before any work, naming the argument, what it was and what it must be.
    """
    q, k, v = autocast(q, k, v)
    check_attention(q, k, v, log_decay, log_decay_v, scale, initial_state, return_state, cu_seqlens, schedule)
    backend = choose(backend, q.device, q.dtype)
    scale, initial_state = factor(scale, q), in_state_dtype(initial_state, q)
    output, state = custom_op.linear_attention(
        q, k, v, log_decay, log_decay_v, scale, initial_state, cu_seqlens, schedule, return_state, backend
    )
    return (output, state) if return_state else output


@replayed
def linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    log_decay: Tensor | None = None,
    log_decay_v: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """One token of :func:`linear_attention`, for decoding: updates ``state`` in place and returns the token's output.

    Args:
        q: ``[B, Hq, D]``. k: ``[B, Hk, D]``. v: ``[B, Hv, E]``. Heads are shared as in :func:`linear_attention`.
        state: ``[B, H, D, E]``, float32, bfloat16 or float16 (float64 for float64 inputs); computed in float32 and
            rounded once. Any view that is dense along D or along E, such as the transpose of a cache ``[B, H, E, D]``,
            is updated where it is.
        log_decay: ``[H]``, ``[B, H]`` or ``[B, H, D]``; log_decay_v: ``[B, H, E]``. Natural logarithms.
        scale: factor of the output. None: ``D ** -0.5``.
        backend: a name from :func:`fulmen.backends`, or "auto".

    Returns:
        ``[B, H, E]`` in q's dtype.

    Raises:
        TypeError, ValueError: before any work; the state is then as it was. Also if grad is enabled and an input
            requires it: an update in place has no gradient.
    """
    q, k, v = autocast(q, k, v)
    check_step(q, k, v, state, log_decay, log_decay_v, scale)
    backend = choose(backend, q.device, q.dtype)
    return custom_op.linear_attention_step(q, k, v, state, log_decay, log_decay_v, factor(scale, q), backend)


@replayed
def chunk_states(
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    log_decay_v: Tensor | None = None,
    initial_state: Tensor | None = None,
    chunk_size: int = 128,
    schedule: str = "auto",
    backend: str = "auto",
) -> Tensor:
    """The states of :func:`linear_attention` at the boundaries of chunks, differentiable in every tensor argument.

    Args:
        k: ``[B, N, Hk, D]``. v: ``[B, N, Hv, E]``.
        log_decay: ``[H]``, ``[B, N, H]`` or ``[B, N, H, D]``; log_decay_v: ``[B, N, H, E]``. H is the largest number of
            heads of k, v and the decays.
        initial_state: ``[B, H, D, E]``, any float dtype.
        chunk_size: tokens per chunk; the last chunk may be shorter.
        schedule: "loop" walks the chunks one by one, "parallel" computes all their contributions first.
        backend: a name from :func:`fulmen.backends`, or "auto".

    Returns:
        ``[B, H, ceil(N / chunk_size) + 1, D, E]``, float32 (float64 for float64 inputs): the state that enters each
        chunk, and the final one last.
    """
    k, v = autocast(k, v)
    check_states(k, v, log_decay, log_decay_v, initial_state, chunk_size, schedule)
    backend = choose(backend, k.device, k.dtype)
    initial_state = in_state_dtype(initial_state, k)
    chunk_size = min(int(chunk_size), _LONGEST_CHUNK)
    return custom_op.chunk_states(k, v, log_decay, log_decay_v, initial_state, chunk_size, schedule, backend)
