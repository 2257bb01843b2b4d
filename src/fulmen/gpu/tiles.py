"""Tile sizes, warps and stages of every kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fulmen.gpu.architectures import Architecture


class Tile(NamedTuple):
    chunk: int  # tokens walked at once
    width: int  # channels of the written axis in one program
    warps: int
    stages: int  # of the loads' pipeline


def padded(size: int) -> int:
    """The channels a kernel works on for ``size`` of them: a power of two, and what tensor cores take at least."""
    return max(16, 1 << (size - 1).bit_length())


def scan_tile(
    architecture: Architecture, read: int, write: int, dtype: torch.dtype, channel: bool, gradient: bool, small: bool
) -> Tile:
    chunk = 16 if channel else 64 if read <= 128 else 32
    if dtype == torch.float32:
        chunk = min(chunk, 32) if read <= 128 else 16
    width = 64 if read <= 128 else 32
    if small or gradient:
        width, chunk = 32, min(chunk, 32)
    return Tile(chunk, min(width, padded(write)), 4, 1)


def summarise_tile(
    architecture: Architecture, read: int, write: int, dtype: torch.dtype, channel: bool, small: bool
) -> Tile:
    return scan_tile(architecture, read, write, dtype, channel, False, small)


def fold_tile(architecture: Architecture) -> Tile:
    return Tile(32, 64, 4, 1)


def recurrent_tile(architecture: Architecture, read: int, write: int) -> Tile:
    return Tile(1, min(max(4096 // padded(read), 16), padded(write)), 4, 1)
