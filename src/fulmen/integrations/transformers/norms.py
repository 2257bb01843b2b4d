"""The norms of transformers' models with a mixer that is ours: once that is fast, they are up to a tenth of a prefill.

Each function is the forward of the classes that compute it. In 16 bits, what transformers rounds in between is rounded
once here, at the end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulmen.nn import norms
from fulmen.runtime.checks import check_choice
from fulmen.runtime.tensors import at_least_float32


def rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    """``weight · n``, in the dtype of such a product."""
    dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)
    return _normed(hidden_states.to(dtype), None, self.weight, self.variance_epsilon)


def rms_norm_in_dtype(self: Any, hidden_states: Tensor) -> Tensor:
    """The same, in the dtype of the tokens."""
    return _normed(hidden_states, None, self.weight, self.variance_epsilon)


def rms_norm_from_one(self: Any, x: Tensor) -> Tensor:
    """``(1 + weight) · n``; some have a norm for each group of channels."""
    return _normed(x, None, 1.0 + at_least_float32(self.weight), self.eps, group=getattr(self, "group_size", None))


def rms_norm_gated(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
    """The gate comes first; some have a norm for each group of channels."""
    group = getattr(self, "group_size", None)
    return _normed(hidden_states, gate, self.weight, self.variance_epsilon, "silu", gate_first=True, group=group)


def rms_norm_then_gate(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    """The gate comes last."""
    check_choice("activation", self.activation, tuple(norms.ACTIVATIONS))
    return _normed(hidden_states, gate, self.weight, self.variance_epsilon, self.activation)


def _normed(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    eps: float,
    activation: str | None = None,
    *,
    gate_first: bool = False,
    group: int | None = None,
) -> Tensor:
    """In the dtype of x. What is multiplied has one dtype, or float32 beside it."""
    dtype = x.dtype if gate is None else torch.promote_types(x.dtype, gate.dtype)

    def rows(y: Tensor) -> Tensor:
        return y if group is None else y.unflatten(-1, (-1, group))

    y = norms.rms_norm(
        rows(x.to(dtype)),
        None if gate is None else rows(gate.to(dtype)),
        rows(weight if weight.dtype == dtype else at_least_float32(weight)),
        eps,
        activation,
        gate_first,
    )
    return (y if group is None else y.flatten(-2)).to(x.dtype)
