"""Tile sizes, warps and stages of every kernel: a table, no autotuning, so the first call is as fast as any other and
the same call gives the same bits on every card of the same kind.

How entries were chosen: by compiling (`fulmen inspect`), since no GPU was at hand; wide tiles were preferred and
narrowed where they spilled. Wide, because a program reads the whole of x and y for each tile of the written axis: at
128 channels, 64 columns request 1.5 times the bytes of reading all once, 32 columns 2.5 times. One stage, because a
second one, where it was tried, held operands in registers for longer and spilled.

What limits: with R channels of the read axis a program holds its state [R, width], x and y [chunk, R], and Triton lets
every warp hold a whole operand of a product whose result has fewer rows than columns; so chunks are short. Decays per
channel, float16, float32 and 256 channels need more of such operands than there are registers on NVIDIA. There the read
axis is cut into slices of 16 channels or more, one for each warp, and what is summed over the axis is added up through
shared memory. (With 64 channels there are two warps for each of 4 slices, for the written axis.) In bfloat16, decays
that channels share do without: adding up would be most of their work. On AMD, 64 channels always do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fulmen.gpu.architectures import Architecture


class Tile(NamedTuple):
    chunk: int  # tokens walked at once
    width: int  # channels of the written axis in one program
    warps: int
    slices: int = 1  # of the read axis, for a warp each
    registers: int | None = None  # that ptxas may use for a thread; None: as many as it finds best
    stages: int = 1  # of the loads' pipeline


# By the decays of a walk, whether it collects a decay's gradient, and the (padded) channels it reads: up to 64, 128,
# 256, 512. A decay is shared by all channels, or one axis has one per channel, or both have.
# Left alone, ptxas settles on 128 registers for some of the sliced ones and spills a few bytes.
_SLICED = {
    64: Tile(16, 64, 8, 4, 255),
    128: Tile(16, 64, 8, 8, 255),
    256: Tile(16, 32, 8, 8, 255),
    512: Tile(16, 16, 8, 8, 255),
}
_NARROW = _SLICED | {64: Tile(16, 32, 8, 4, 255), 128: Tile(16, 32, 8, 8, 255)}
_NVIDIA = {
    "shared": _SLICED | {64: Tile(32, 64, 4), 128: Tile(32, 64, 8)},
    "shared, gradient": _SLICED | {64: Tile(16, 64, 4), 128: Tile(16, 64, 8)},
    "one axis": _SLICED,
    "one axis, gradient": _SLICED,
    "both axes": _SLICED,
    "both axes, gradient": _NARROW,
}
_FREE = {"shared": _NVIDIA["shared"] | {64: Tile(32, 64, 4, 1, 255)}}  # ptxas may use all registers
_SHORT = {64: Tile(16, 64, 4), 128: Tile(16, 64, 4), 256: Tile(16, 32, 4), 512: Tile(16, 16, 4)}
_SHORT_SLICED = _SHORT | {128: Tile(16, 64, 4, 4), 256: Tile(16, 32, 4, 4), 512: Tile(16, 16, 4, 4)}
_AMD = dict.fromkeys(_NVIDIA, _SHORT_SLICED) | {
    "shared": _SHORT | {64: Tile(32, 64, 4), 128: Tile(32, 64, 4)},
    "shared, gradient": _SHORT,
}
# By architecture where it has tiles of its own, else by vendor.
_TABLE = {
    "cuda": _NVIDIA,
    "hip": _AMD,
    "sm_80": _NVIDIA | _FREE,
    "sm_90": _NVIDIA | {"both axes, gradient": _SLICED},
    # Of 240 to 255 registers for decays of both axes, 253 spill nothing.
    "sm_100": _NVIDIA | _FREE | {"both axes, gradient": _NARROW | {64: Tile(16, 32, 4, 4, 253)}},
}
# The "recompute" schedule trades reads for shared memory.
_SMALL_WIDTH = 32


def launch_options(tile: Tile) -> dict[str, int]:
    """What Triton is told at a launch besides a kernel's arguments."""
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return options if tile.registers is None else options | {"maxnreg": tile.registers}


def padded(size: int) -> int:
    """The channels a kernel works on for ``size`` of them: a power of two, and what tensor cores take at least."""
    return max(16, 1 << (size - 1).bit_length())


def scan_tile(
    architecture: Architecture, read: int, write: int, dtype: torch.dtype, axes: int, gradient: bool, small: bool
) -> Tile:
    """For a walk over chunks, or a summary of segments.

    Args:
        read: channels of the axis that is summed over; write: of the other one.
        axes: how many of the two have a decay per channel.
        gradient: whether the gradient of a decay is collected.
        small: for the "recompute" schedule.
    """
    # What is one term of a product in bfloat16 is two in float16 and three in float32, as with decays per channel.
    axes = max(axes, {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}[dtype])
    what = ("shared", "one axis", "both axes")[axes] + (", gradient" if gradient else "")
    tiles = _TABLE.get(architecture.name, _TABLE[architecture.backend])
    tile = tiles[what][max(64, padded(read))]
    if small:
        tile = tile._replace(chunk=16)
    width = min(tile.width, padded(write), _SMALL_WIDTH if small else tile.width)
    return tile._replace(width=width, slices=min(tile.slices, padded(read) // 16))


def fold_tile() -> Tile:
    """``chunk`` rows and ``width`` columns of a state; memory is all that counts. 32 rows spilled on sm_100."""
    return Tile(16, 64, 4)


def sum_tile(size: int) -> Tile:
    """For sums of rows of ``size`` numbers, which may be one."""
    width = min(1 << (size - 1).bit_length(), 64)
    return Tile(min(1024 // width, 128), width, 4)


def recurrent_tile(read: int, write: int) -> Tile:
    """A state of 4096 elements stays in 32 registers of each thread; with 512 channels it is twice that."""
    return Tile(1, min(max(4096 // padded(read), 16), padded(write)), 4)


def tpa_tile(architecture: Architecture, key_size: int, value_size: int, dtype: torch.dtype, heads: int) -> Tile:
    """``chunk`` tokens at once; ``width`` heads in one program, whose output [heads, E] stays in registers. With four
    warps or 64 tokens, some uses spilled on NVIDIA, and others where ptxas settled on 128 registers."""
    large = max(padded(key_size), padded(value_size))
    chunk = 16 if large > 256 or (dtype == torch.float32 and large > 64) else 32
    warps = 8 if architecture.backend == "cuda" or large > 128 else 4
    registers = 255 if architecture.backend == "cuda" else None
    most_heads = 16 if large > (128 if dtype == torch.float32 else 256) else 32
    return Tile(chunk, min(padded(heads), most_heads), warps, registers=registers)


def tpa_ranks(key_size: int, dtype: torch.dtype) -> int:
    """The most ranks of a query that a program multiplies at once; with more of them it puts the query together first.
    64 rows of float32 would not fit shared memory."""
    return 16 if dtype == torch.float32 and padded(key_size) > 64 else 64


class ProductTile(NamedTuple):
    chunk: int  # tokens at once
    depth: int  # channels of x in one program (a sum of outer products) or in one product (rows times a matrix)
    width: int  # channels of the result's other axis
    warps: int
    stages: int = 1


# The largest that spill nothing in bfloat16 and float16, since each tile of the result reads its operands anew; float32
# operands take twice the room. By the bytes of an element.
_GATE_SUM = {2: ProductTile(32, 128, 128, 8), 4: ProductTile(16, 64, 64, 8)}
_GATED_SUM_WIDTH = 64  # 128 spill on sm_120
_GATE_ROWS = {2: ProductTile(128, 32, 128, 8), 4: ProductTile(32, 32, 64, 8)}
_NARROW_GATE_ROWS = {2: ProductTile(128, 16, 64, 8), 4: ProductTile(32, 32, 64, 8)}  # for at most 64 columns


def gate_sum_tile(rows: int, columns: int, dtype: torch.dtype, gated: bool) -> ProductTile:
    """For the sum over tokens of outer products, ``[rows, columns]``; ``gated`` where columns have a factor."""
    return _fitted(_GATE_SUM[dtype.itemsize], rows, min(columns, _GATED_SUM_WIDTH) if gated else columns)


def gate_rows_tile(depth: int, columns: int, dtype: torch.dtype) -> ProductTile:
    """For rows of ``depth`` channels times a matrix ``[depth, columns]``."""
    tiles = _NARROW_GATE_ROWS if columns <= 64 else _GATE_ROWS
    return _fitted(tiles[dtype.itemsize], depth, columns)


def _fitted(tile: ProductTile, depth: int, width: int) -> ProductTile:
    return tile._replace(depth=min(tile.depth, padded(depth)), width=min(tile.width, padded(width)))
