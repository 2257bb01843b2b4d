"""Tile sizes and warps of the kernels of tensor-product attention."""

from __future__ import annotations

import torch

from fulmen.runtime.architectures import Architecture
from fulmen.triton_common.tiles import Tile, padded


def decode_tile(architecture: Architecture, key_size: int, value_size: int, dtype: torch.dtype, heads: int) -> Tile:
    """``chunk`` tokens at once; ``width`` heads in one program, whose output [heads, E] stays in registers.

    By the model of an A100 (docs/gpu_cost.md): with 168 registers three programs fit a multiprocessor, and take 0.37 of
    the time of one with 8 warps and 255. What is not modelled may use all registers: ptxas would settle on 128."""
    large = max(padded(key_size), padded(value_size))
    most_heads = 16 if large > (128 if dtype == torch.float32 else 256) else 32
    width = min(padded(heads), most_heads)
    if architecture.backend == "cuda" and large <= 128 and dtype.itemsize == 2:
        return Tile(32, width, 4, registers=168, stages=2)
    chunk = 16 if large > 256 or (dtype == torch.float32 and large > 64) else 32
    warps = 8 if architecture.backend == "cuda" or large > 128 else 4
    return Tile(chunk, width, warps, registers=255 if architecture.backend == "cuda" else None)


def decode_ranks(key_size: int, dtype: torch.dtype) -> int:
    """The most ranks of a query that a program multiplies at once; with more of them it puts the query together first.
    64 rows of float32 would not fit shared memory."""
    return 16 if dtype == torch.float32 and padded(key_size) > 64 else 64
