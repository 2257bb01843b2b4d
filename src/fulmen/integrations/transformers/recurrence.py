"""Linear attention of rows that may hold several packed sequences each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

import fulmen
from fulmen.integrations.transformers.packing import Packing


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor | None, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Output ``[B, N, H, E]`` and the states ``[B, H, D, E]`` that leave the rows, unscaled.

    q, k, v and a decay ``[B, N, H]`` or ``[H]``; the state ``[B, H, D, E]`` enters the first sequence of its row.
    ``options``: a call's keyword arguments, which may say where sequences start.
    """
    packing = Packing.of(options, *q.shape[:2])
    if packing is None:
        return fulmen.linear_attention(q, k, v, log_decay=log_decay, scale=1.0, initial_state=state, return_state=True)
    output, states = fulmen.linear_attention(
        packing.flat(q),
        packing.flat(k),
        packing.flat(v),
        log_decay=log_decay if log_decay.ndim == 1 else packing.flat(log_decay),
        scale=1.0,
        initial_state=packing.entering(state),
        return_state=True,
        cu_seqlens=packing.cu_seqlens,
    )
    return packing.rows_of(output), packing.leaving(states)
