"""Rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """x ``[B, N, R, D]`` turned by its positions ``[B, N]``: channel i with channel i + D / 2. Angles are float32."""
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angles = positions[..., None, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
