"""Operators that walk a state, on rows that may hold several packed sequences each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fulmen.integrations.transformers.packing import Packing


def over_rows(
    operator: Callable[..., Any],
    *inputs: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    packed: Mapping[str, Any],
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Output ``[B, N, H, E]`` of an operator, and the states ``[B, H, D, E]`` that leave the rows.

    Inputs are ``[B, N, ...]``, a decay may be ``[H]``; the state ``[B, H, D, E]`` enters the first sequence of its row.
    ``packed``: a call's keyword arguments, which may say where sequences start. ``options`` are the operator's.
    """
    packing = Packing.of(packed, *inputs[0].shape[:2])
    if packing is None:
        return operator(*inputs, log_decay=log_decay, initial_state=state, return_state=True, **options)
    output, states = operator(
        *map(packing.flat, inputs),
        log_decay=log_decay if log_decay.ndim == 1 else packing.flat(log_decay),
        initial_state=packing.entering(state),
        return_state=True,
        cu_seqlens=packing.cu_seqlens,
        **options,
    )
    return packing.rows_of(output), packing.leaving(states)
