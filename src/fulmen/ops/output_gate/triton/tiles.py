"""Tile sizes and warps of the output gate's kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fulmen.runtime.architectures import Architecture
from fulmen.triton_common.tiles import launch_options, padded


class ProductTile(NamedTuple):
    chunk: int  # tokens at once
    depth: int  # channels of x in one program (a sum of outer products) or in one product (rows times a matrix)
    width: int  # channels of the result's other axis
    warps: int
    stages: int = 1

    @property
    def options(self) -> dict[str, int]:
        return launch_options(self.warps, self.stages)


# By the bytes of an element. Those of 16 bits were chosen by the model of an A100 (docs/gpu_cost.md): all of them are
# bound by memory there at 128 channels. float32 operands take twice the room.
_SUM = {2: ProductTile(32, 128, 128, 8, stages=3), 4: ProductTile(16, 64, 64, 8)}
_ROWS = {2: ProductTile(64, 128, 128, 8, stages=2), 4: ProductTile(32, 32, 64, 8)}


def sum_tile(rows: int, columns: int, dtype: torch.dtype, architecture: Architecture) -> ProductTile:
    """For the sum over tokens of outer products, ``[rows, columns]``."""
    return _fitted(_SUM[dtype.itemsize], rows, columns, architecture)


def rows_tile(depth: int, columns: int, dtype: torch.dtype, architecture: Architecture) -> ProductTile:
    """For rows of ``depth`` channels times a matrix ``[depth, columns]``."""
    return _fitted(_ROWS[dtype.itemsize], depth, columns, architecture)


def _fitted(tile: ProductTile, depth: int, width: int, architecture: Architecture) -> ProductTile:
    """On AMD a pipeline's second stage takes shared memory that gfx942 does not have."""
    stages = tile.stages if architecture.backend == "cuda" else 1
    return tile._replace(depth=min(tile.depth, padded(depth)), width=min(tile.width, padded(width)), stages=stages)
