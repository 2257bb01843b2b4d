"""Checks of arguments that several operators have. A message names the argument, what it was and what it must be."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MAX_SIZE = 512


def check_tensor(name: str, x: Tensor, like: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None; got {type(x).__name__}")
    if x.device != like.device:
        raise ValueError(f"{name} must be on the device of q, k and v, {like.device}; got {x.device}")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor; got layout {x.layout}")


def check_scale(scale: float) -> None:
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"scale must be a real number; got {scale!r}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")
