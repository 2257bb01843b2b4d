"""Numbers that models turn into decays."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor
from torch.nn.functional import softplus


def at_least_float32(x: Tensor) -> Tensor:
    """What is the exponent of a decay."""
    return x if x.dtype == torch.float64 else x.float()


def step_size(dt: Tensor, dt_bias: Tensor | None = None, *, dt_softplus: bool = True) -> Tensor:
    """softplus(dt + dt_bias), in float32 at least."""
    dt = at_least_float32(dt)
    if dt_bias is not None:
        dt = dt + dt_bias
    return softplus(dt) if dt_softplus else dt


def decay_rate(A_log: Tensor) -> Tensor:
    """-exp(A_log), in float32 at least: the log-decay of a step of size 1."""
    return -at_least_float32(A_log).exp()


def initial_dt_bias(size: int, least: float = 1e-3, most: float = 1e-1) -> Tensor:
    """A bias ``[size]`` with which step sizes begin between ``least`` and ``most``, evenly in their logarithms."""
    dt = torch.empty(size).uniform_(log(least), log(most)).exp().clamp(min=1e-4)
    return dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus
