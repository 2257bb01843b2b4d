"""The public functions: signature, documentation, checks, and one call."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from fulmen.ops.delta_rule import custom_op
from fulmen.ops.delta_rule.validation import check_delta_rule, check_step
from fulmen.runtime.backends import choose
from fulmen.runtime.replay import replayed
from fulmen.runtime.tensors import autocast, factor, in_state_dtype


@overload
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    log_decay: Tensor | None = ...,
    normalize_qk: bool = ...,
    scale: float | None = ...,
    initial_state: Tensor | None = ...,
    return_state: Literal[False] = ...,
    cu_seqlens: Tensor | None = ...,
    schedule: str = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    log_decay: Tensor | None = ...,
    normalize_qk: bool = ...,
    scale: float | None = ...,
    initial_state: Tensor | None = ...,
    return_state: Literal[True],
    cu_seqlens: Tensor | None = ...,
    schedule: str = ...,
    backend: str = ...,
) -> tuple[Tensor, Tensor]: ...


@replayed
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    log_decay: Tensor | None = None,
    normalize_qk: bool = False,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    schedule: str = "auto",
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The delta rule, gated or not: linear attention that writes what its state does not know yet::

        S_t = diag(exp(a_t)) S_{t-1} + k_t u_tᵀ          a = log_decay
        u_t = β_t (v_t - (diag(exp(a_t)) S_{t-1})ᵀ k_t)
        o_t = scale · q_tᵀ S_t

    One decay per token is Gated DeltaNet, one per channel Kimi Delta Attention, none DeltaNet. The cost is linear in N.
    Gradients flow to every tensor argument, from the output and from the final state.

    Args:
        q: ``[B, N, Hq, D]``; float32, bfloat16, float16 or float64. D and E may be 1 to 512.
        k: ``[B, N, Hk, D]``, dtype of q. With β |k|² above 2 the state grows from token to token: normalize it.
        v: ``[B, N, Hv, E]``, dtype of q. H is the largest of Hq, Hk, Hv; each divides it, and head h reads head
            ``h // (H / Hx)`` of a tensor with Hx heads.
        beta: ``[B, N, H]``, any float dtype, 0 to 2: how much of the correction is written.
        log_decay: natural logarithm of the decay, any float dtype, at most 0; -inf forgets the state. One per head
            ``[H]``, per token ``[B, N, H]``, or per channel ``[B, N, H, D]``. None: no decay.
        normalize_qk: use q / sqrt(Σq² + 1e-6) and k alike, computed in float32.
        scale: factor of the output. None: ``D ** -0.5``.
        initial_state: S_0, ``[B, H, D, E]`` (``[sequences, H, D, E]`` with cu_seqlens), any float dtype. None: zeros.
        return_state: also return the final state.
        cu_seqlens: ``[sequences + 1]``, int32 or int64: where each of several sequences packed along N starts, and N.
            B must be 1. Sequences may be empty. Each has its own initial and final state. On a GPU its values are not
            checked, as that would wait for the device; tokens after the last sequence get zeros there.
        schedule: "recurrent", "loop", "parallel", "recompute" or "auto"; see ``docs/delta_rule.md``.
        backend: a name from :func:`fulmen.backends`, or "auto".

    Returns:
        The output ``[B, N, H, E]`` in q's dtype; with ``return_state=True`` a pair of it and the final state, shaped
        like ``initial_state``, float32 (float64 for float64 inputs).

    Raises:
        TypeError, ValueError: before any work, naming the argument, what it was and what it must be.
    """
    q, k, v = autocast(q, k, v)
    check_delta_rule(q, k, v, beta, log_decay, normalize_qk, scale, initial_state, return_state, cu_seqlens, schedule)
    backend = choose(backend, q.device, q.dtype, "delta_rule")
    scale, initial_state = factor(scale, q), in_state_dtype(initial_state, q)
    output, state = custom_op.delta_rule(
        q, k, v, beta, log_decay, normalize_qk, scale, initial_state, cu_seqlens, schedule, return_state, backend
    )
    return (output, state) if return_state else output


@replayed
def delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    log_decay: Tensor | None = None,
    normalize_qk: bool = False,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """One token of :func:`delta_rule`, for decoding: updates ``state`` in place and returns the token's output.

    Args:
        q: ``[B, Hq, D]``. k: ``[B, Hk, D]``. v: ``[B, Hv, E]``. beta: ``[B, H]``. As in :func:`delta_rule`.
        state: ``[B, H, D, E]``, float32, bfloat16 or float16 (float64 for float64 inputs); computed in float32 and
            rounded once. Any view that is dense along D or along E, such as the transpose of a cache ``[B, H, E, D]``,
            is updated where it is.
        log_decay: ``[H]``, ``[B, H]`` or ``[B, H, D]``. Natural logarithms.
        normalize_qk: use q / sqrt(Σq² + 1e-6) and k alike, computed in float32.
        scale: factor of the output. None: ``D ** -0.5``.
        backend: a name from :func:`fulmen.backends`, or "auto".

    Returns:
        ``[B, H, E]`` in q's dtype.

    Raises:
        TypeError, ValueError: before any work; the state is then as it was. Also if grad is enabled and an input
            requires it: an update in place has no gradient.
    """
    q, k, v = autocast(q, k, v)
    check_step(q, k, v, beta, state, log_decay, normalize_qk, scale)
    backend = choose(backend, q.device, q.dtype, "delta_rule")
    return custom_op.delta_rule_step(q, k, v, beta, state, log_decay, normalize_qk, factor(scale, q), backend)
