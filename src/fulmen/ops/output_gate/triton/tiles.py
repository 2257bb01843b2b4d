"""Tile sizes and warps of the output gate's kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

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


# By the bytes of an element. The largest that spill nothing in bfloat16 and float16, since each tile of the result
# reads its operands again; float32 operands take twice the room.
_SUM = {2: ProductTile(32, 128, 128, 8), 4: ProductTile(16, 64, 64, 8)}
_GATED_SUM_WIDTH = 64  # 128 spill on sm_120
_ROWS = {2: ProductTile(128, 32, 128, 8), 4: ProductTile(32, 32, 64, 8)}
_NARROW_ROWS = {2: ProductTile(128, 16, 64, 8), 4: ProductTile(32, 32, 64, 8)}  # for at most 64 columns


def sum_tile(rows: int, columns: int, dtype: torch.dtype, gated: bool) -> ProductTile:
    """For the sum over tokens of outer products, ``[rows, columns]``; ``gated`` where columns have a factor."""
    return _fitted(_SUM[dtype.itemsize], rows, min(columns, _GATED_SUM_WIDTH) if gated else columns)


def rows_tile(depth: int, columns: int, dtype: torch.dtype) -> ProductTile:
    """For rows of ``depth`` channels times a matrix ``[depth, columns]``."""
    tiles = _NARROW_ROWS if columns <= 64 else _ROWS
    return _fitted(tiles[dtype.itemsize], depth, columns)


def _fitted(tile: ProductTile, depth: int, width: int) -> ProductTile:
    return tile._replace(depth=min(tile.depth, padded(depth)), width=min(tile.width, padded(width)))
