"""Chunks, tile sizes and warps of the kernels of the delta rule: a table.

How entries were chosen, since no GPU was at hand: by the modelled time of the compiled code (`fulmen inspect`), which
counts spills as what they cost. At 128 channels in bfloat16 with a decay's gradient (two terms), ms of a launch of
batch 4, 32 heads and 1024 tokens:

    value channels, warps of the walk back     32, 4    64, 4    64, 8
    token decay, A100                            0.51     0.68     0.77
    token decay, H100                            0.28     0.23
    channel decay, H100                          0.38     0.26

    key channels, warps of the gradients       64, 4    32, 4    64, 8    32, 8
    token decay, A100                            1.18     1.48     2.32     3.19
    token decay, H100                            0.79     0.97     1.52     2.04
    channel decay, A100                          1.79     2.84
    channel decay, H100                          1.19     1.82

The walk to the right takes 0.17 either way on an H100 with a token decay. The rest was chosen by compiling. With 64
tokens to a chunk the walks and the gradients spilled hundreds of bytes to thousands where it was tried (sm_80, sm_90).
Walks with one term have 64 value channels, a row of tensor-core tiles for each of 4 warps, and two stages, so that the
next chunk's rows arrive in shared memory while this one's are multiplied. AMD is not modelled.
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
    wide = precision == "one term" or (precision == "two terms" and architecture.name == "sm_90")
    width = min(_WALK_WIDTH.get(padded(key_size), 64 if wide else 32), padded(value_size))
    stages = 2 if architecture.backend == "cuda" and padded(key_size) <= LONG else 1
    return Tile(chunk, width, 4, registers=_REGISTERS[architecture.backend], stages=stages)


def gradient_tile(architecture: Architecture, chunk: int, key_size: int, precision: str) -> Tile:
    """``width`` key channels in a program; it takes ``VALUES_AT_ONCE`` value channels at once."""
    wide = precision == "one term" or (precision == "two terms" and architecture.backend == "cuda")
    width = min(padded(key_size), 64 if wide else 32)
    return Tile(chunk, width, 4, registers=_REGISTERS[architecture.backend])


def finish_tile(key_size: int) -> Tile:
    """All channels of some tokens."""
    width = padded(key_size)
    return Tile(max(4096 // width, 8), width, 4)


def recurrent_tile(key_size: int, value_size: int) -> Tile:
    """A state of 4096 elements stays in 32 registers of each thread; with 512 channels it is twice that."""
    return Tile(1, min(max(4096 // padded(key_size), 16), padded(value_size)), 4)
