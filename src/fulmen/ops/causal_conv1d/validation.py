"""Every check of what a caller hands in, before any work is done: attributes of tensors, never their values."""

from __future__ import annotations

from torch import Tensor

from fulmen.ops.chunks.sequences import check_cu_seqlens
from fulmen.ops.chunks.validation import check_in_place, refuse_gradients
from fulmen.runtime.checks import DTYPES, check_alike, check_flag, check_tensor, once_per_signature

ACTIVATIONS = (None, "silu")
WIDEST = 64


@once_per_signature
def check_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    initial_state: Tensor | None,
    return_state: bool,
    cu_seqlens: Tensor | None,
) -> None:
    _check_x(x, "[B, N, C]")
    _check_parameters(x, weight, bias, activation)
    check_flag("return_state", return_state)
    letters, states = "[B, C, W]", x.shape[0]
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, x, "x")
        letters, states = "[sequences, C, W]", cu_seqlens.shape[0] - 1
    if initial_state is not None:
        _check_state("initial_state", initial_state, letters, states, x, weight)


@once_per_signature
def check_step(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
    _check_x(x, "[B, C]")
    _check_parameters(x, weight, bias, activation)
    if state is None:
        raise TypeError("state must be a torch.Tensor [B, C, W]; got None")
    _check_state("state", state, "[B, C, W]", x.shape[0], x, weight)
    check_in_place(state, x)
    inputs = {"x": x, "state": state, "weight": weight, "bias": bias}
    refuse_gradients("causal_conv1d_step", "causal_conv1d", inputs)


def _check_x(x: Tensor, layout: str) -> None:
    check_alike(layout, {"x": x})
    rank = layout.count(",") + 1
    if x.ndim != rank:
        raise ValueError(f"x must have {rank} dimensions, {layout}; got shape {list(x.shape)}")
    if x.shape[-1] < 1:
        raise ValueError(f"x must have at least one channel; got shape {list(x.shape)}")


def _check_parameters(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
    channels = x.shape[-1]
    if weight is None:
        raise TypeError("weight must be a torch.Tensor [C, K]; got None")
    _check_float("weight", weight, x)
    if weight.ndim != 2 or weight.shape[0] != channels:
        raise ValueError(f"weight must have shape [C, K] with C = {channels}; got {list(weight.shape)}")
    if not 1 <= weight.shape[1] <= WIDEST:
        raise ValueError(f"weight must have K of 1 to {WIDEST}; got shape {list(weight.shape)}")
    if bias is not None:
        _check_float("bias", bias, x)
        if bias.shape != (channels,):
            raise ValueError(f"bias must have shape [C] = [{channels}]; got {list(bias.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}; got {activation!r}")


def _check_state(name: str, state: Tensor, letters: str, states: int, x: Tensor, weight: Tensor) -> None:
    _check_float(name, state, x)
    channels, width = weight.shape
    if state.ndim != 3 or state.shape[:2] != (states, channels) or state.shape[2] < width - 1:
        least = f"[{states}, {channels}, W] with W at least K - 1 = {width - 1}"
        raise ValueError(f"{name} must have shape {letters} = {least}; got {list(state.shape)}")


def _check_float(name: str, x: Tensor, like: Tensor) -> None:
    check_tensor(name, x, like, "x")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64; got {x.dtype}")
