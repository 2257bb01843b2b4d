"""Tile sizes and warps of the convolution's kernels: they move memory, and a tile is long in the dense dimension."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fulmen.triton_common.tiles import launch_options, padded


class ConvolutionTile(NamedTuple):
    tokens: int
    channels: int
    warps: int = 4

    @property
    def options(self) -> dict[str, int]:
        return launch_options(self.warps)


# By the cost model (docs/gpu_cost.md), without states.
DENSE_CHANNELS, DENSE_TOKENS = ConvolutionTile(8, 128), ConvolutionTile(64, 16)
GRADIENT_OF_DENSE_CHANNELS, GRADIENT_OF_DENSE_TOKENS = ConvolutionTile(32, 64), ConvolutionTile(32, 16)
ONE_TOKEN = ConvolutionTile(1, 256)


def forward_tile(x: Tensor) -> ConvolutionTile:
    """For ``[B, N, C]``."""
    return DENSE_TOKENS if has_dense_tokens(x) else DENSE_CHANNELS


def backward_tile(x: Tensor, taps: int) -> ConvolutionTile:
    """A chunk has the last ``taps - 1`` of its tokens in common with the next one."""
    tile = GRADIENT_OF_DENSE_TOKENS if has_dense_tokens(x) else GRADIENT_OF_DENSE_CHANNELS
    return tile._replace(tokens=max(tile.tokens, padded(2 * taps)))


def has_dense_tokens(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(2) != 1
