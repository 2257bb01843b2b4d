"""Tile sizes, warps and stages of the kernels of linear attention: a table, chosen by the cost model (docs/gpu.md)."""

from __future__ import annotations

import os

import torch

from fulmen.ops.chunks.decay_form import Decays
from fulmen.runtime.architectures import Architecture
from fulmen.triton_common.tiles import Tile, WalkTile, few_channels, padded

# Of walks, by how products are computed, for up to 128 channels that are read. By the cost model, on the size of the
# published tables: of the chunks, widths, warps and registers that were tried, those that take the least time, spilling
# or not. Half of a 128 x 128 state, in 4 warps, leaves room for three
# programs on a multiprocessor of an A100 and for two on an H100's, where products of 64 rows go to the faster tensor
# instructions. sm_120 has the instructions of sm_80, sm_100 those that need 64 rows; AMD's were only compiled.
_AMPERE = {
    "one term": WalkTile(32, 64, 4, 2, 168, True, 3),
    "prepared": WalkTile(32, 64, 4, 2, 168, True, 3),
    "two terms": WalkTile(16, 64, 4, 3, 168, True, 3),
    "counted": WalkTile(16, 64, 4, 3, 168, True, 3),
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
    "counted": WalkTile(64, 32, 4, 2, 255, False, 2),
    "three terms": WalkTile(32, 64, 4, 2, 255, False, 2),
    "float32": WalkTile(16, 64, 4, 2, 255, True, 2),
}
_WALKS = {
    "sm_80": _AMPERE,
    "sm_90": _HOPPER,
    # Without the pattern that was reported to fail on Hopper with Triton 3.7.1: chunks of 64, 4 warps, wgmma.
    "sm_90_short": _HOPPER | dict.fromkeys(("one term", "two terms", "counted"), _HOPPER["three terms"]),
    "sm_100": _HOPPER,
    "sm_120": _AMPERE,
    "gfx942": {name: tile._replace(registers=None, resident=2) for name, tile in _AMPERE.items()},
    "gfx950": {name: tile._replace(registers=None, resident=2) for name, tile in _AMPERE.items()},
}
WALK_TILES = "FULMEN_WALK_TILES"  # the environment variable that takes another line of this table: "sm_90_short"
# The "recompute" schedule trades reads for shared memory.
_SMALL_WIDTH = 32


def walk_tile(
    architecture: Architecture, read: int, write: int, precision: str, dtype: torch.dtype, decays: Decays,
    small: bool, counts_decays: bool = False,
) -> WalkTile:  # fmt: skip
    """For a walk over chunks.

    Args:
        read: channels of the axis that is summed over; write: of the other one.
        precision: of products (:mod:`fulmen.triton_common.products`); dtype: of the inputs.
        small: for the "recompute" schedule.
        counts_decays: with a second state, for the gradient of a decay per head.
    """
    tiles = _WALKS[_line_of(architecture)]
    tile = tiles.get(precision, tiles["float32"])
    if padded(read) <= 64 and tiles is _AMPERE and not decays.key.has_tokens:
        tile = _FEW_CHANNELS.get(precision, tile)
    if precision == "two terms" and counts_decays:
        tile = tiles["counted"]
    if precision == "two terms" and decays.channel_axes > 0:
        tile = tiles["prepared"]
    if architecture.name == "sm_100" and not fits_tensor_memory(read, write, precision, dtype, decays):
        tile = tile._replace(width=min(tile.width, 32), mirrored=True)  # too narrow for the instructions that use it
    width = max(tile.width * 128 // max(padded(read), 128), 16)  # the state is as large for more channels
    if small:
        tile, width = tile._replace(chunk=16), min(width, _SMALL_WIDTH)
    if padded(read) > 128 and tile.registers is not None:
        tile = tile._replace(registers=255, resident=max(tile.resident - 1, 1))
    if padded(read) > 256:  # two stages of rows would not fit shared memory
        tile = tile._replace(chunk=max(tile.chunk // 2, 16))
    return tile._replace(width=min(width, padded(write)))


def fits_tensor_memory(read: int, write: int, precision: str, dtype: torch.dtype, decays: Decays) -> bool:
    """Whether 512 columns are enough, by compiling: they are for two terms of bfloat16, and not for more. The gradients
    of decays of both axes, of one per head beside the values', and of few channels have three."""
    three = decays.channel_axes == 2 or (decays.channel_axes == 1 and decays.key.by_head) or few_channels(read, write)
    return dtype == torch.bfloat16 and precision in ("one term", "two terms") and not three


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
