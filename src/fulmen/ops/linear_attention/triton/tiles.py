"""Tile sizes, warps and stages of the kernels of linear attention: a table, chosen by the cost model (docs/gpu.md)."""

from __future__ import annotations

import os

from fulmen.ops.chunks.decay_form import Decays
from fulmen.runtime.architectures import Architecture
from fulmen.triton_common.tiles import Tile, WalkTile, padded

# Of walks, by how products are computed, for up to 128 channels that are read. By the cost model, on the size of the
# published tables: of the chunks, widths, warps and registers that were tried, those that take the least time, spilling
# or not. Half of a 128 x 128 state, in 4 warps, leaves room for three
# programs on a multiprocessor of an A100 and for two on an H100's, where products of 64 rows go to the faster tensor
# instructions. sm_120 has the instructions of sm_80, sm_100 those that need 64 rows; AMD's were only compiled.
_AMPERE = {
    "one term": WalkTile(32, 64, 4, 2, 168, True, 3),
    "prepared": WalkTile(32, 64, 4, 2, 168, True, 3),
    "two terms": WalkTile(16, 64, 4, 3, 168, True, 3),
    "three terms": WalkTile(16, 64, 4, 2, 168, True, 3),
    "float32": WalkTile(16, 64, 4, 2, 255, True, 2),
}
# Of up to 64 channels, without a decay per token, whose weights would spill. Tiles of all 64 that are written leave
# half of an A100 without a program at the published size: sequences would be partitioned, and k and v read once more
# for the states between segments.
_FEW_CHANNELS = {"one term": WalkTile(64, 32, 4, 2, 168, True, 3)}
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


def walk_tile(
    architecture: Architecture, read: int, write: int, precision: str, decays: Decays, small: bool
) -> WalkTile:
    """For a walk over chunks.

    Args:
        read: channels of the axis that is summed over; write: of the other one.
        precision: of products (:mod:`fulmen.triton_common.products`).
        small: for the "recompute" schedule.
    """
    tiles = _WALKS[_line_of(architecture)]
    tile = tiles.get(precision, tiles["float32"])
    if padded(read) <= 64 and tiles is _AMPERE and not decays.key.has_tokens:
        tile = _FEW_CHANNELS.get(precision, tile)
    if decays.channel_axes > 0 and precision == "two terms":
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
    have their rows on different warps, 16 on each, and where there are fewer rows warps repeat each other's work. With
    168 registers there are six programs on a multiprocessor, whose spills cost an H100 less than what four wait."""
    return Tile(chunk, min(padded(read), 64), chunk // 16, 168 if architecture.backend == "cuda" else None)


def merge_tile(architecture: Architecture, chunk: int, read: int) -> Tile:
    """For chunks that decay too much. Mostly there are none and programs only look, so as many as fit at once."""
    return Tile(chunk, min(padded(read), 32), 4, 128 if architecture.backend == "cuda" else None)


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
