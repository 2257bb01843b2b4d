"""Checks of arguments that several operators have. A message names the argument, what it was and what it must be."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from math import isfinite
from numbers import Integral, Real
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fulmen.runtime.torch_private import forward_mode, refuse_tangents

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MAX_SIZE = 512

_Check = TypeVar("_Check", bound=Callable[..., None])
_MOST_REMEMBERED = 4096


def once_per_signature(check: _Check) -> _Check:
    """Run ``check``, which is called with positional arguments, only on ones unlike any it has accepted before.

    A decode loop makes the same call again and again, and looking up what a check may look at (every attribute of a
    tensor but its values, and all else as it is) takes a third of the time of looking at it all.
    """
    accepted: set[object] = set()

    @wraps(check)
    def checked(*args: Any) -> None:
        if torch.compiler.is_compiling():
            return check(*args)
        if forward_mode():
            refuse_tangents(args)
        try:
            signature = (
                torch.is_grad_enabled(),
                *[
                    (x.shape, x.stride(), x.dtype, x.device, x.layout, x.requires_grad, x.is_neg())
                    if isinstance(x, Tensor)
                    else (type(x), x)
                    for x in args
                ],
            )
            known = signature in accepted
        except (TypeError, RuntimeError):  # something without a hash, or a tensor without strides
            return check(*args)
        if known:
            return None
        check(*args)
        if len(accepted) >= _MOST_REMEMBERED:
            accepted.clear()
        accepted.add(signature)
        return None

    return cast(_Check, checked)


def check_alike(layout: str, inputs: dict[str, Tensor]) -> None:
    """Dense tensors of one float dtype on one device; ``layout`` is for the message."""
    first_name, first = next(iter(inputs.items()))
    for name, x in inputs.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be {f'a torch.Tensor {layout}'.strip()}; got {type(x).__name__}")
        if x.layout != torch.strided:
            raise TypeError(f"{name} must be a dense tensor; got layout {x.layout}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float32, bfloat16, float16 or float64; got {x.dtype}")
        if x.dtype != first.dtype:
            raise TypeError(f"{name} must have the dtype of {first_name}, {first.dtype}; got {x.dtype}")
        if x.device != first.device:
            raise ValueError(f"{name} must be on the device of {first_name}, {first.device}; got {x.device}")


def check_inputs(layout: str, **inputs: Tensor) -> None:
    """What inputs of one ``layout`` must have in common: all but the number of heads and the last dimension."""
    check_alike(layout, inputs)
    axes = layout.strip("[]").split(", ")
    rank = len(axes)
    first_name, first = next(iter(inputs.items()))
    for name, x in inputs.items():
        if x.ndim != rank:
            raise ValueError(f"{name} must have {rank} dimensions, {layout}; got shape {list(x.shape)}")
    for name, x in inputs.items():
        if x.shape[: rank - 2] != first.shape[: rank - 2]:
            same = " and ".join(axes[: rank - 2])
            raise ValueError(
                f"{name} must have the same {same} as {first_name}, {list(first.shape)}; got shape {list(x.shape)}"
            )
        if not 1 <= x.shape[-1] <= MAX_SIZE:
            raise ValueError(f"{name} must have a last dimension of 1 to {MAX_SIZE}; got shape {list(x.shape)}")


def check_tensor(name: str, x: Tensor, like: Tensor, whose: str = "q, k and v") -> None:
    """A tensor on the device of ``like``; ``whose`` that is, for the message."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None; got {type(x).__name__}")
    if x.device != like.device:
        raise ValueError(f"{name} must be on the device of {whose}, {like.device}; got {x.device}")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor; got layout {x.layout}")


def check_scale(scale: float | None) -> None:
    if scale is None:
        return
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(f"scale must be a real number or None; got {scale!r}")
    try:
        finite = isfinite(scale)
    except OverflowError:  # an integer beyond every float
        finite = False
    if not finite:
        raise ValueError(f"scale must be finite; got {scale!r}")


def check_count(name: str, count: int, least: int = 1) -> None:
    if isinstance(count, bool) or not isinstance(count, Integral):
        raise TypeError(f"{name} must be an integer; got {count!r}")
    if count < least:
        raise ValueError(f"{name} must be at least {least}; got {count}")


def check_rows(rows: Tensor | list[int] | slice, count: int | None) -> None:
    """Which of a cache's ``count`` rows; None: it is empty. Values that a GPU holds are not looked at."""
    if isinstance(rows, slice):
        return
    if isinstance(rows, Tensor):
        if rows.ndim != 1 or rows.is_floating_point() or rows.is_complex():
            raise TypeError(f"rows must be indices [rows]; got {rows.dtype} of shape {list(rows.shape)}")
        indices = rows.tolist() if rows.device.type == "cpu" and rows.dtype != torch.bool else []
    elif isinstance(rows, list) and all(isinstance(row, Integral) for row in rows):
        indices = rows
    else:
        raise TypeError(f"rows must be a tensor or list of indices, or a slice; got {rows!r}")
    if count is not None and any(not -count <= row < count for row in indices):
        raise ValueError(f"rows must be below {count}, the rows that there are; got {indices}")


def check_flag(name: str, flag: bool) -> None:
    if not isinstance(flag, bool):
        raise TypeError(f"{name} must be True or False; got {flag!r}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")
