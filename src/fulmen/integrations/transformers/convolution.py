"""The short convolutions, under transformers' names and with its arguments."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import fulmen
from fulmen.integrations.transformers.packing import Packing

# transformers' names of what the operator calls "silu".
SILU = ("silu", "swish")


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """All tokens: hidden_states ``[B, C, N]``, weight ``[C, K]``, bias ``[C]``. A call that continues has earlier
    tokens before those that ``seq_idx`` or ``cu_seq_lens_q`` speak of."""
    x = hidden_states.transpose(1, 2)
    packing = Packing.of(kwargs, *x.shape[:2], continues=True)
    if packing is None:
        return fulmen.causal_conv1d(x, weight, bias, activation=_activation(activation)).transpose(1, 2)
    y = fulmen.causal_conv1d(
        packing.flat(x), weight, bias, activation=_activation(activation), cu_seqlens=packing.cu_seqlens
    )
    return packing.rows_of(y).transpose(1, 2)


def causal_conv1d_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """One token: hidden_states ``[B, C, 1]``; conv_state ``[B, C, K]`` is rolled in place."""
    if hidden_states.shape[-1] != 1:
        raise ValueError(f"hidden_states must be one token, [B, C, 1]; got shape {list(hidden_states.shape)}")
    x = hidden_states.squeeze(-1)
    return fulmen.causal_conv1d_step(x, conv_state, weight, bias, activation=_activation(activation)).unsqueeze(-1)


def _activation(name: str | None) -> str | None:
    return "silu" if name in SILU else name
