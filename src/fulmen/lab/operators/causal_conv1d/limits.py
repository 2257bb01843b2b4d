"""The convolution with SiLU against torch's own depthwise ``conv1d`` and ``silu``, and a step against the torch code
that models run for one token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

import fulmen
from fulmen.lab.bench.figures import Call, Figure
from fulmen.lab.bench.measure import interleaved

CHANNELS, LENGTH, WIDTH = 6144, 2048, 4
SIZE = f"C{CHANNELS} K{WIDTH} n{LENGTH}"


def by_torch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The same of ``[B, N, C]``: torch has channels before tokens."""
    channels, width = weight.shape
    y = conv1d(x.transpose(1, 2), weight[:, None], bias, padding=width - 1, groups=channels)
    return silu(y[..., : x.shape[1]]).transpose(1, 2)


def step_by_torch(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """One token ``[B, C]``, the state ``[B, C, W]`` updated in place."""
    window = torch.cat((state, x[:, :, None]), -1)
    state.copy_(window[:, :, -state.shape[2] :])
    return silu(conv1d(window, weight[:, None], bias, groups=weight.shape[0])[:, :, -1])


def convolution(
    dtype: torch.dtype, name: str, forward: tuple[float, float], training: tuple[float, float]
) -> list[Figure]:
    """``forward`` and ``training``: what the figure must reach and what we aim for."""
    torch.manual_seed(0)
    weight, bias = torch.randn(CHANNELS, WIDTH).to(dtype), torch.randn(CHANNELS).to(dtype)
    figures = []
    for dense in ("channels", "tokens"):
        shape = (1, LENGTH, CHANNELS) if dense == "channels" else (1, CHANNELS, LENGTH)
        x, grad = (torch.randn(shape).to(dtype) for _ in range(2))
        if dense == "tokens":
            x, grad = x.transpose(1, 2), grad.transpose(1, 2)
        inputs = [x, weight, bias]
        calls: dict[str, Call] = {
            "torch": partial(by_torch, *inputs),
            "native": partial(native, *inputs),
            "torch, both": both(by_torch, inputs, grad),
            "native, both": both(native, inputs, grad),
        }
        t = {call: timing.median for call, timing in interleaved(calls, seconds=6.0, repeats=5).items()}
        what = f"{name}, dense {dense}, {SIZE}, against torch"
        figures += [
            Figure(f"conv + SiLU forward, {what}", t["torch"] / t["native"], *forward, "x"),
            Figure(f"conv + SiLU forward + backward, {what}", t["torch, both"] / t["native, both"], *training, "x"),
        ]
    return figures


def native(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return fulmen.causal_conv1d(x, weight, bias, activation="silu", backend="native")


def both(function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> Call:
    leaves = [x.detach().requires_grad_() for x in inputs]

    @torch.enable_grad()
    def call() -> object:
        return torch.autograd.grad(function(*leaves), leaves, grad)

    return call


def single() -> list[Figure]:
    return convolution(torch.float32, "fp32", (3, 5), (2, 3))


def half() -> list[Figure]:
    return convolution(torch.bfloat16, "bf16", (2, 4), (2, 4))


def step() -> list[Figure]:
    """One token; torch's bfloat16 convolution of so few is slower by orders of magnitude, and no yardstick."""
    x, state = torch.randn(1, CHANNELS), torch.zeros(1, CHANNELS, WIDTH)
    weight, bias = torch.randn(CHANNELS, WIDTH), torch.randn(CHANNELS)
    calls: dict[str, Call] = {
        "torch": lambda: step_by_torch(x, state, weight, bias),
        "native": lambda: fulmen.causal_conv1d_step(x, state, weight, bias, activation="silu", backend="native"),
    }
    t = {call: timing.median for call, timing in interleaved(calls, seconds=2.0, repeats=200).items()}
    return [
        Figure(
            f"conv + SiLU of one token, fp32, C{CHANNELS} K{WIDTH}, against torch", t["torch"] / t["native"], 4, 8, "x"
        )
    ]


LIMITS = (single, half, step)
