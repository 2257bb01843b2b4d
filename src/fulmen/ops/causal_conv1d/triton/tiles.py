"""Tile sizes and warps of the convolution's kernels: they move memory, and a tile is long in the dense dimension."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fulmen.triton_common.tiles import launch_options


class ConvolutionTile(NamedTuple):
    tokens: int
    channels: int
    warps: int = 4

    @property
    def options(self) -> dict[str, int]:
        return launch_options(self.warps)


# They spill nothing on any architecture in bfloat16. A gradient has twice the tensors in registers.
DENSE_CHANNELS, DENSE_TOKENS = ConvolutionTile(8, 128), ConvolutionTile(64, 16)
GRADIENT_OF_DENSE_CHANNELS, GRADIENT_OF_DENSE_TOKENS = ConvolutionTile(8, 64), ConvolutionTile(32, 16)
ONE_TOKEN = ConvolutionTile(1, 256)


def forward_tile(x: Tensor) -> ConvolutionTile:
    """For ``[B, N, C]``."""
    return DENSE_TOKENS if has_dense_tokens(x) else DENSE_CHANNELS


def backward_tile(x: Tensor) -> ConvolutionTile:
    return GRADIENT_OF_DENSE_TOKENS if has_dense_tokens(x) else GRADIENT_OF_DENSE_CHANNELS


def has_dense_tokens(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(2) != 1
