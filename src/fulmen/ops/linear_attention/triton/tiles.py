"""Tile sizes, warps and stages of the kernels of linear attention: a table.

How the entries of scans, which serve decays per channel of the values, and chunk states, were chosen: by compiling
(`fulmen inspect`); wide tiles were preferred and narrowed where they spilled. Wide, because a program reads the whole
of x and y for each tile of the written axis: at 128 channels, 64 columns request 1.5 times the bytes of reading all
once, 32 columns 2.5 times. One stage, because a second one, where it was tried, held operands in registers for longer
and spilled. The cost model, by which walks were chosen, does not prefer what spills nothing.

What limits: with R channels of the read axis a program holds its state [R, width], x and y [chunk, R], and Triton lets
every warp hold a whole operand of a product whose result has fewer rows than columns; so chunks are short. Decays per
channel, float16, float32 and 256 channels need more of such operands than there are registers on NVIDIA. There the read
axis is in slices of 16 channels or more, one for each warp, and what is summed over the axis is added up through
shared memory. (With 64 channels there are two warps for each of 4 slices, for the written axis.) In bfloat16, scalar
decays do without: adding up would be most of their work. On AMD, 64 channels always do.
"""

from __future__ import annotations

import os

import torch

from fulmen.ops.chunks.decay_form import Decays
from fulmen.runtime.architectures import Architecture
from fulmen.triton_common.tiles import Tile, WalkTile, padded

# By how many axes have a decay per channel, whether the walk collects a decay's gradient, and the (padded) channels it
# reads: up to 64, 128, 256, 512.
# Left alone, ptxas settles on 128 registers for some of the sliced ones and spills a few bytes.
_SLICED = {
    64: Tile(16, 64, 8, 4, 255),
    128: Tile(16, 64, 8, 8, 255),
    256: Tile(16, 32, 8, 8, 255),
    512: Tile(16, 16, 8, 8, 255),
}
_NARROW = _SLICED | {64: Tile(16, 32, 8, 4, 255), 128: Tile(16, 32, 8, 8, 255)}
_NVIDIA = {
    (0, False): _SLICED | {64: Tile(32, 64, 4), 128: Tile(32, 64, 8)},
    (0, True): _SLICED | {64: Tile(16, 64, 4), 128: Tile(16, 64, 8)},
    (1, False): _SLICED,
    (1, True): _SLICED,
    (2, False): _SLICED,
    (2, True): _NARROW,
}
_FREE = {(0, False): _NVIDIA[0, False] | {64: Tile(32, 64, 4, 1, 255)}}  # ptxas may use all registers
_SHORT = {64: Tile(16, 64, 4), 128: Tile(16, 64, 4), 256: Tile(16, 32, 4), 512: Tile(16, 16, 4)}
_SHORT_SLICED = _SHORT | {128: Tile(16, 64, 4, 4), 256: Tile(16, 32, 4, 4), 512: Tile(16, 16, 4, 4)}
_AMD = dict.fromkeys(_NVIDIA, _SHORT_SLICED) | {
    (0, False): _SHORT | {64: Tile(32, 64, 4), 128: Tile(32, 64, 4)},
    (0, True): _SHORT,
}
# By architecture where it has tiles of its own, else by vendor.
_TABLE = {
    "cuda": _NVIDIA,
    "hip": _AMD,
    "sm_80": _NVIDIA | _FREE,
    "sm_90": _NVIDIA | {(2, True): _SLICED},
    # Of 240 to 255 registers for decays of both axes, 253 spill nothing.
    "sm_100": _NVIDIA | _FREE | {(2, True): _NARROW | {64: Tile(16, 32, 4, 4, 253)}},
}
# Of walks (scans serve what they do not), by how products are computed, for up to 128 channels that are read. By the
# cost model (docs/gpu.md), on the size of the published tables: of the chunks, widths, warps and registers that were
# tried, those that take the least time, spilling or not. Half of a 128 x 128 state, in 4 warps, leaves room for three
# programs on a multiprocessor of an A100 and for two on an H100's, where products of 64 rows go to the faster tensor
# instructions. sm_120 has the instructions of sm_80, sm_100 those that need 64 rows; AMD's were only compiled.
_AMPERE = {
    "one term": WalkTile(32, 64, 4, 2, 168, True, 3),
    "prepared": WalkTile(32, 64, 4, 2, 168, True, 3),
    "two terms": WalkTile(16, 64, 4, 2, 168, True, 3),
    "three terms": WalkTile(16, 64, 4, 2, 168, True, 3),
    "float32": WalkTile(16, 64, 4, 2, 255, True, 2),
}
_HOPPER = {
    "one term": WalkTile(64, 64, 4, 2, 255, False, 2),
    "prepared": WalkTile(32, 64, 4, 2, 255, True, 2),
    "two terms": WalkTile(64, 64, 4, 2, 255, False, 2),
    "three terms": WalkTile(32, 64, 4, 2, 255, False, 2),
    "float32": WalkTile(16, 64, 4, 2, 255, True, 2),
}
_WALKS = {
    "sm_80": _AMPERE,
    "sm_90": _HOPPER,
    # Without the pattern that was reported to fail on Hopper with Triton 3.7.1: chunks of 64, 4 warps, wgmma.
    "sm_90_short": _HOPPER | dict.fromkeys(("one term", "two terms"), _HOPPER["three terms"]),
    "sm_100": _HOPPER,
    "sm_120": _AMPERE,
    "gfx942": {name: tile._replace(registers=None, resident=2) for name, tile in _AMPERE.items()},
    "gfx950": {name: tile._replace(registers=None, resident=2) for name, tile in _AMPERE.items()},
}
WALK_TILES = "FULMEN_WALK_TILES"  # the environment variable that takes another line of this table: "sm_90_short"
# The "recompute" schedule trades reads for shared memory.
_SMALL_WIDTH = 32


def scan_tile(
    architecture: Architecture, read: int, write: int, dtype: torch.dtype, decays: Decays, gradient: bool, small: bool
) -> Tile:
    """For a walk over chunks, or a summary of segments.

    Args:
        read: channels of the axis that is summed over; write: of the other one.
        decays: the forms of the two axes.
        gradient: whether the gradient of a decay is collected.
        small: for the "recompute" schedule.
    """
    # What is one term of a product in bfloat16 is two in float16 and three in float32, as with decays per channel.
    axes = max(decays.channel_axes, {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}[dtype])
    tiles = _TABLE.get(architecture.name, _TABLE[architecture.backend])
    tile = tiles[axes, gradient][max(64, padded(read))]
    if small:
        tile = tile._replace(chunk=16)
    width = min(tile.width, padded(write), _SMALL_WIDTH if small else tile.width)
    return tile._replace(width=width, slices=min(tile.slices, padded(read) // 16))


def walk_tile(
    architecture: Architecture, read: int, write: int, precision: str, small: bool, prepared: bool = False
) -> WalkTile:
    """For a walk over chunks.

    Args:
        read: channels of the axis that is summed over; write: of the other one.
        precision: of products (:mod:`fulmen.triton_common.products`).
        small: for the "recompute" schedule.
        prepared: whether rows and scores of a decay per channel were.
    """
    tiles = _WALKS[_line_of(architecture)]
    tile = tiles.get(precision, tiles["float32"])
    if prepared and precision == "two terms":
        tile = tiles["prepared"]
    width = max(tile.width * 128 // max(padded(read), 128), 16)  # the state is as large for more channels
    if small:
        tile, width = tile._replace(chunk=16), min(width, _SMALL_WIDTH)
    if padded(read) > 128 and tile.registers is not None:
        tile = tile._replace(registers=255, resident=max(tile.resident - 1, 1))
    if padded(read) > 256:  # two stages of rows would not fit shared memory
        tile = tile._replace(chunk=max(tile.chunk // 2, 16))
    return tile._replace(width=min(width, padded(write)))


def _line_of(architecture: Architecture) -> str:
    """Of the table of walks. The variable counts on the architecture that its line is for."""
    wanted = os.environ.get(WALK_TILES) or architecture.name
    if wanted not in _WALKS:
        raise ValueError(f"{WALK_TILES} must be one of {', '.join(_WALKS)}; got {wanted!r}")
    return wanted if wanted.startswith(architecture.name) else architecture.name


def prepare_tile(architecture: Architecture, chunk: int, read: int) -> Tile:
    """For what walks read where every channel decays: ``width`` channels at once. Products that depend on each other
    have their rows on different warps, 16 on each, and where there are fewer rows warps repeat each other's work."""
    return Tile(chunk, min(padded(read), 64), chunk // 16, 1, 255 if architecture.backend == "cuda" else None)


def merge_tile(architecture: Architecture, chunk: int, read: int) -> Tile:
    """For chunks that decay too much. Mostly there are none and programs only look, so as many as fit at once."""
    return Tile(chunk, min(padded(read), 32), 4, 1, 128 if architecture.backend == "cuda" else None)


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
