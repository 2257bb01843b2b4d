"""What the families share: our operators in FLA's conventions of states, directions and gates."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

import fulmen
from fulmen.runtime.checks import check_inputs
from fulmen.runtime.tensors import autocast

Results = tuple[Tensor, Tensor | None]  # outputs, and final states where they are requested


def run(
    operator: Callable[..., Any],
    *inputs: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool = False,
    **options: Any,
) -> Results:
    """One of our operators. States are ``[N, H, K, V]``, with ``state_v_first`` ``[N, H, V, K]``."""
    if state_v_first and initial_state is not None:
        initial_state = initial_state.mT
    results = operator(*inputs, initial_state=initial_state, return_state=output_final_state, **options)
    if not output_final_state:
        return results, None
    output, state = results
    return output, state.mT.contiguous() if state_v_first else state


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    log_decay_v: Tensor | None = None,
    *,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    reverse: bool = False,
    state_v_first: bool = False,
) -> Results:
    """:func:`fulmen.linear_attention`, with ``reverse`` from the last token of each sequence to its first."""
    options: dict[str, Any] = {
        "scale": scale,
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "cu_seqlens": cu_seqlens,
        "state_v_first": state_v_first,
    }
    if reverse:
        return in_reverse(attend, q, k, v, log_decay, log_decay_v, **options)
    return run(fulmen.linear_attention, q, k, v, log_decay=log_decay, log_decay_v=log_decay_v, **options)


def in_reverse(
    function: Callable[..., Results],
    *inputs: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    **options: Any,
) -> Results:
    """``function`` from the last token of each sequence to its first. Inputs are ``[B, T, ...]``, or ``[H]``, which has
    no tokens."""
    backwards = [x if x is None or x.ndim == 1 else x.flip(1) for x in inputs]
    packed = cu_seqlens is not None
    if cu_seqlens is not None:  # a packed row that is read backwards has its last sequence first
        tokens = next(x.shape[1] for x in inputs if x is not None)
        cu_seqlens = tokens - cu_seqlens.flip(0)
        initial_state = None if initial_state is None else initial_state.flip(0)
    output, state = function(*backwards, initial_state=initial_state, cu_seqlens=cu_seqlens, **options)
    return output.flip(1), state.flip(0) if packed and state is not None else state


def checked(**inputs: Tensor) -> tuple[Tensor, ...]:
    """Inputs ``[B, T, H, K]`` (or V, or M) as autocast wants them; what is wrong with them is said of FLA's names."""
    given = autocast(*inputs.values())
    check_inputs("[B, T, H, K]", **dict(zip(inputs, given, strict=True)))
    return given


def check_gate(name: str, gate: Tensor, axes: str, shape: tuple[int, ...]) -> None:
    """Our operators take a decay in several forms, a function of FLA's in one."""
    if not isinstance(gate, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor {axes}; got {type(gate).__name__}")
    if gate.shape != shape:
        raise ValueError(f"{name} must have shape {axes} = {list(shape)}; got {list(gate.shape)}")


def sequences(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """How many there are in ``[B, T, ...]``, N."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def v_first(state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    """``state_v_first``, or what it was called before."""
    if transpose_state_layout is None:
        return state_v_first
    if state_v_first:
        raise ValueError("state_v_first and transpose_state_layout, its former name, must not both be given")
    warnings.warn("transpose_state_layout is now state_v_first", DeprecationWarning, stacklevel=3)
    return transpose_state_layout
