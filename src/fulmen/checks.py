"""Checks of arguments that several operators have. A message names the argument, what it was and what it must be."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MAX_SIZE = 512


def check_inputs(layout: str, **inputs: Tensor) -> None:
    """What inputs of one ``layout`` must have in common: all but the number of heads and the last dimension."""
    axes = layout.strip("[]").split(", ")
    rank = len(axes)
    first_name, first = next(iter(inputs.items()))
    for name, x in inputs.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor {layout}; got {type(x).__name__}")
        if x.layout != torch.strided:
            raise TypeError(f"{name} must be a dense tensor; got layout {x.layout}")
        if x.ndim != rank:
            raise ValueError(f"{name} must have {rank} dimensions, {layout}; got shape {list(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float32, bfloat16, float16 or float64; got {x.dtype}")
        if x.dtype != first.dtype:
            raise TypeError(f"{name} must have the dtype of {first_name}, {first.dtype}; got {x.dtype}")
        if x.device != first.device:
            raise ValueError(f"{name} must be on the device of {first_name}, {first.device}; got {x.device}")
        if x.shape[: rank - 2] != first.shape[: rank - 2]:
            same = " and ".join(axes[: rank - 2])
            raise ValueError(
                f"{name} must have the same {same} as {first_name}, {list(first.shape)}; got shape {list(x.shape)}"
            )
        if not 1 <= x.shape[-1] <= MAX_SIZE:
            raise ValueError(f"{name} must have a last dimension of 1 to {MAX_SIZE}; got shape {list(x.shape)}")


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
