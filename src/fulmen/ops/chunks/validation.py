"""Checks of log-decays and states, which several operators have."""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.ops.chunks.decay_form import DecayForm
from fulmen.runtime.checks import DTYPES, check_tensor

SCHEDULES = ("auto", "recurrent", "loop", "parallel", "recompute")


def check_key_size(q: Tensor, k: Tensor) -> None:
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k must have the last dimension of q, {q.shape[-1]}; got shape {list(k.shape)}")


def check_decay(
    name: str, log_decay: Tensor | None, like: Tensor, heads: int, forms: tuple[DecayForm, ...], size: str = "D"
) -> None:
    """A log-decay is None or has one of the ``forms``, for ``like`` ``[B, N, heads, D]`` (of a step ``[B, heads, D]``);
    ``size`` is the letter of its last axis."""
    if log_decay is None:
        return
    check_tensor(name, log_decay, like)
    if log_decay.dtype not in DTYPES:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64; got {log_decay.dtype}")
    step = like.ndim == 3
    extent = dict(zip(("B", "H", size) if step else ("B", "N", "H", size), like.shape, strict=True)) | {"H": heads}
    shapes = {form.axes(size, step): [extent[axis] for axis in form.axes(size, step)] for form in forms}
    if list(log_decay.shape) not in shapes.values():
        allowed = " or ".join(f"[{', '.join(axes)}] = {shape}" for axes, shape in shapes.items())
        raise ValueError(f"{name} must have shape {allowed}; got {list(log_decay.shape)}")


def check_state(name: str, state: Tensor, letters: str, shape: tuple[int, ...], like: Tensor) -> None:
    """A state of any float dtype, for inputs such as ``like``."""
    check_tensor(name, state, like)
    if state.shape != shape:
        raise ValueError(f"{name} must have shape {letters} = {list(shape)}; got {list(state.shape)}")
    if state.dtype not in DTYPES:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64; got {state.dtype}")


def check_updatable(state: Tensor, like: Tensor) -> None:
    """A step updates the state ``[B, H, D, E]`` in place, and sweeps D or E, whichever is dense."""
    check_in_place(state, like)
    strides, sizes = state.stride(), state.shape
    if not any(strides[i] == 1 or sizes[i] == 1 for i in (2, 3)):
        raise ValueError(f"state must be dense (stride 1) along D or along E; got strides {list(strides)}")


def check_in_place(state: Tensor, like: Tensor) -> None:
    """A step updates the state in place: every element must have its own place in memory."""
    if (state.dtype == torch.float64) != (like.dtype == torch.float64):
        allowed = "float64" if like.dtype == torch.float64 else "float32, bfloat16 or float16"
        raise TypeError(f"state must be {allowed} for {like.dtype} inputs; got {state.dtype}")
    strides, sizes = state.stride(), state.shape
    long = [i for i in range(state.ndim) if sizes[i] > 1]
    for i in long:
        # What the dimensions with smaller strides take. (No sorting: sizes and strides may be symbolic.)
        inner = sum((sizes[j] - 1) * strides[j] for j in long if j != i and (strides[j], j) <= (strides[i], i))
        if strides[i] <= inner:
            raise ValueError(
                f"state must have memory of its own for each element, to be updated in place; got shape {list(sizes)} "
                f"with strides {list(strides)}"
            )
    if not torch.compiler.is_compiling() and state.is_neg():
        raise ValueError("state must not be a lazily negated view; pass state.resolve_neg()")


def refuse_gradients(step: str, trained: str, inputs: dict[str, Tensor | None]) -> None:
    """A step has no gradient; ``trained`` is the operator that has one."""
    if not torch.is_grad_enabled():
        return
    for name, x in inputs.items():
        if x is not None and x.requires_grad:
            raise ValueError(
                f"{name} must not require grad: {step} updates the state in place and has no gradient; call it under "
                f"torch.no_grad(), or use {trained} to train"
            )
