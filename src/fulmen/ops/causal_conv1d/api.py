"""The public functions: signature, documentation, checks, and one call."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from fulmen.ops.causal_conv1d import custom_op
from fulmen.ops.causal_conv1d.validation import check_convolution, check_step
from fulmen.runtime.backends import choose
from fulmen.runtime.replay import replayed
from fulmen.runtime.tensors import autocast


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = ...,
    *,
    activation: str | None = ...,
    initial_state: Tensor | None = ...,
    return_state: Literal[False] = ...,
    cu_seqlens: Tensor | None = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = ...,
    *,
    activation: str | None = ...,
    initial_state: Tensor | None = ...,
    return_state: Literal[True],
    cu_seqlens: Tensor | None = ...,
    backend: str = ...,
) -> tuple[Tensor, Tensor]: ...


@replayed
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal convolution of each channel with K weights of its own::

        y_t = activation(bias + Σ_j weight[:, j] · x_{t-K+1+j})          j = 0 … K-1

    Gradients flow to x, weight, bias and initial_state, from the output and from the final state. Sums are float32
    (float64 for float64 inputs), and a result is rounded once.

    Args:
        x: ``[B, N, C]``; float32, bfloat16, float16 or float64. Any strides: a transposed ``[B, C, N]`` is read where
            it is, and the output has the order of strides of x.
        weight: ``[C, K]``, any float dtype; K may be 1 to 64. The last weight is that of the token itself.
        bias: ``[C]``, any float dtype. None: zeros.
        activation: "silu" or None.
        initial_state: ``[B, C, W]`` (``[sequences, C, W]`` with cu_seqlens), W at least K - 1, any float dtype: the
            last W inputs before the first token, oldest first. None: zeros.
        return_state: also return the final state, the last W inputs.
        cu_seqlens: ``[sequences + 1]``, int32 or int64: where each of several sequences packed along N starts, and N.
            B must be 1. Sequences may be empty. Each has its own initial and final state. On a GPU its values are not
            checked, as that would wait for the device; tokens after the last sequence get zeros there.
        backend: a name from :func:`fulmen.backends`, or "auto".

    Returns:
        The output ``[B, N, C]`` in x's dtype; with ``return_state=True`` a pair of it and the final state in x's dtype,
        shaped like ``initial_state``, or with W = K - 1 where there is none.

    Raises:
        TypeError, ValueError: before any work, naming the argument, what it was and what it must be.
    """
    (x,) = autocast(x)
    check_convolution(x, weight, bias, activation, initial_state, return_state, cu_seqlens)
    backend = choose(backend, x.device, x.dtype)
    if initial_state is not None and initial_state.dtype != x.dtype:
        initial_state = initial_state.to(x.dtype)
    output, state = custom_op.causal_conv1d(
        x, weight, bias, activation, initial_state, cu_seqlens, return_state, backend
    )
    return (output, state) if return_state else output


@replayed
def causal_conv1d_step(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    backend: str = "auto",
) -> Tensor:
    """One token of :func:`causal_conv1d`, for decoding: rolls ``state`` in place and returns the token's output.

    Args:
        x: ``[B, C]``.
        state: ``[B, C, W]``, W at least K - 1: the last W inputs, oldest first; afterwards x is the last of them.
            float32, bfloat16 or float16 (float64 for float64 inputs), any strides.
        weight: ``[C, K]``. bias: ``[C]`` or None. activation: "silu" or None.
        backend: a name from :func:`fulmen.backends`, or "auto".

    Returns:
        ``[B, C]`` in x's dtype.

    Raises:
        TypeError, ValueError: before any work; the state is then as it was. Also if grad is enabled and an input
            requires it: an update in place has no gradient.
    """
    (x,) = autocast(x)
    check_step(x, state, weight, bias, activation)
    return custom_op.causal_conv1d_step(x, state, weight, bias, activation, choose(backend, x.device, x.dtype))
