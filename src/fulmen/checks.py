"""Checks of arguments that several operators have. A message names the argument, what it was and what it must be."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MAX_SIZE = 512

_Arguments = ParamSpec("_Arguments")
_MOST_REMEMBERED = 4096


def once_per_signature(check: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """Run ``check`` only on arguments unlike any it has accepted before.

    A decode loop makes the same call again and again, and looking up what a check may look at (every attribute of a
    tensor but its values, and all else as it is) takes a third of the time of looking at it all.
    """
    accepted: set[object] = set()

    @wraps(check)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        if torch.compiler.is_compiling():
            return check(*args, **kwargs)
        try:
            signature = (torch.is_grad_enabled(), *map(_signature, args), *map(_signature, kwargs.values()))
            known = signature in accepted
        except (TypeError, RuntimeError):  # something without a hash, or a tensor without strides
            return check(*args, **kwargs)
        if known:
            return None
        check(*args, **kwargs)
        if len(accepted) >= _MOST_REMEMBERED:
            accepted.clear()
        accepted.add(signature)
        return None

    return checked


def _signature(x: object) -> object:
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.device, x.layout, x.requires_grad
    return type(x), x


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
