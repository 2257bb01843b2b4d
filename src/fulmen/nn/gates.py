"""Numbers that models turn into decays."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fulmen.runtime.tensors import at_least_float32


def step_size(dt: Tensor, dt_bias: Tensor | None = None, *, dt_softplus: bool = True) -> Tensor:
    """softplus(dt + dt_bias), in float32 at least."""
    dt = at_least_float32(dt)
    if dt_bias is not None:
        dt = dt + dt_bias
    return softplus(dt) if dt_softplus else dt


def decay_rate(A_log: Tensor) -> Tensor:
    """-exp(A_log), in float32 at least: the log-decay of a step of size 1."""
    return -at_least_float32(A_log).exp()


@torch.no_grad()
def init_dt_bias_(dt_bias: Tensor, least: float = 1e-3, most: float = 1e-1) -> None:
    """Step sizes begin between ``least`` and ``most``, evenly in their logarithms."""
    dt = dt_bias.uniform_(log(least), log(most)).exp().clamp(min=1e-4)
    dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus


@torch.no_grad()
def init_decay_rate_(A_log: Tensor) -> None:
    """Log-decays of a step of size 1 begin between -16 and -1."""
    A_log.uniform_(1, 16).log_()
