"""Small helpers on tensors that every operator needs."""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.runtime.torch_private import any_autocast


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states, and of all arithmetic, for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def at_least_float32(x: Tensor) -> Tensor:
    """x in the dtype of its arithmetic: itself, or a copy."""
    dtype = state_dtype(x.dtype)
    return x if x.dtype == dtype else x.to(dtype)


def in_state_dtype(state: Tensor | None, like: Tensor) -> Tensor | None:
    """A state that was given in any float dtype, for inputs such as ``like``."""
    dtype = state_dtype(like.dtype)
    return state if state is None or state.dtype == dtype else state.to(dtype)


def factor(scale: float | None, q: Tensor) -> float:
    """The scale of queries ``[..., D]``: the given one, or D ** -0.5."""
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def dense(x: Tensor) -> Tensor:
    """``x`` with a dense last dimension: itself, or a copy where it has none."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def autocast_enabled(x: Tensor) -> bool:
    """On the device of ``x``; some, such as meta, have no autocast."""
    if not any_autocast():
        return False
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def autocast(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Inputs as autocast wants them; decays and states, which keep their precision, do not come here."""
    first = inputs[0]
    if not any_autocast() or not isinstance(first, Tensor) or not autocast_enabled(first):
        return inputs
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in inputs
    )
