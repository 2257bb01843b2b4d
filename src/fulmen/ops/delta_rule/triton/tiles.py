"""Chunks, tile sizes and warps of the kernels of the delta rule: a table.

How entries were chosen: by compiling (`fulmen inspect`), since no GPU was at hand. With 64 tokens to a chunk the walks
and the gradients spilled hundreds of bytes to thousands where it was tried (sm_80, sm_90). The walks have 64 value
channels, a row of tensor-core tiles for each of 4 warps, and two stages, so that the next chunk's rows arrive in shared
memory while this one's are multiplied. Where products have several terms, 64 channels of the walk back or of the
gradients spilled 2 KB, 32 some bytes.
"""

from __future__ import annotations

import torch

from fulmen.runtime.architectures import Architecture
from fulmen.triton_common.tiles import Tile, padded

CHUNK = 32
# Of float32 inputs: among more tokens whose keys are nearly parallel, the inverse loses digits (docs/delta_rule.md).
# And where rows of more than LONG key channels would fill the shared memory.
SHORT_CHUNK = 16
LONG = 128
# Left alone, ptxas settled on 32 registers for one of the kernels, and spilled 35 KB.
_REGISTERS = {"cuda": 255, "hip": None}
# By padded key channels, up to 128 if not here: the state of a walk stays in registers.
_WALK_WIDTH = {256: 32, 512: 16}
VALUES_AT_ONCE = 32  # in the gradients


def chunk_size(dtype: torch.dtype, key_size: int) -> int:
    return SHORT_CHUNK if dtype == torch.float32 or padded(key_size) > LONG else CHUNK


def prepare_tile(architecture: Architecture, chunk: int, key_size: int, channel: bool) -> Tile:
    """``width`` key channels at once; ``channel`` says that each has a decay of its own."""
    return Tile(chunk, min(padded(key_size), 32 if channel else 64), 4, registers=_REGISTERS[architecture.backend])


def walk_tile(architecture: Architecture, chunk: int, key_size: int, value_size: int, precision: str) -> Tile:
    """``width`` value channels, beside all key channels."""
    widest = 64 if precision == "one term" else 32
    width = min(_WALK_WIDTH.get(padded(key_size), widest), padded(value_size))
    stages = 2 if architecture.backend == "cuda" and padded(key_size) <= LONG else 1
    return Tile(chunk, width, 4, registers=_REGISTERS[architecture.backend], stages=stages)


def gradient_tile(architecture: Architecture, chunk: int, key_size: int, precision: str) -> Tile:
    """``width`` key channels in a program; it takes ``VALUES_AT_ONCE`` value channels at once."""
    width = min(padded(key_size), 64 if precision == "one term" else 32)
    return Tile(chunk, width, 4, registers=_REGISTERS[architecture.backend])


def finish_tile(key_size: int) -> Tile:
    """All channels of some tokens."""
    width = padded(key_size)
    return Tile(max(4096 // width, 8), width, 4)


def recurrent_tile(key_size: int, value_size: int) -> Tile:
    """A state of 4096 elements stays in 32 registers of each thread; with 512 channels it is twice that."""
    return Tile(1, min(max(4096 // padded(key_size), 16), padded(value_size)), 4)
