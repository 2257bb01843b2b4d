"""The gated norms of transformers' Mamba-2 mixers, a tenth of a prefill once its scan is ours."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fulmen.nn.norms import rms_norm
from fulmen.runtime.tensors import at_least_float32


def rms_norm_gated(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
    """hidden_states and gate ``[..., C]``: the gate comes first. Some classes take the norm of groups of channels."""
    size = getattr(self, "group_size", None)

    def rows(x: Tensor) -> Tensor:
        x = at_least_float32(x)
        return x if size is None else x.unflatten(-1, (-1, size))

    y = rms_norm(
        rows(hidden_states),
        None if gate is None else rows(gate),
        rows(self.weight),
        self.variance_epsilon,
        "silu",
        gate_first=True,
    )
    return (y if size is None else y.flatten(-2)).to(hidden_states.dtype)
