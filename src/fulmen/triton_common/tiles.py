"""What a tile of a kernel is; which one a kernel gets stands in its operator's own table. No autotuning: the first call
is as fast as any other, and the same call gives the same bits on every card of the same kind."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    chunk: int  # tokens at once
    width: int  # channels of the written axis in one program
    warps: int
    registers: int | None = None  # that ptxas may use for a thread; None: as many as it finds best
    stages: int = 1  # of the loads' pipeline

    @property
    def options(self) -> dict[str, int]:
        return launch_options(self.warps, self.stages, self.registers)


class WalkTile(NamedTuple):
    """Of a kernel that may be mirrored (:mod:`fulmen.triton_common.mirrored`)."""

    chunk: int
    width: int
    warps: int
    stages: int
    registers: int | None
    mirrored: bool
    resident: int  # programs that a multiprocessor holds at once

    @property
    def options(self) -> dict[str, int]:
        return launch_options(self.warps, self.stages, self.registers)


def launch_options(warps: int, stages: int = 1, registers: int | None = None) -> dict[str, int]:
    """What Triton is told at a launch besides a kernel's arguments. A product and a sum make one instruction: it is
    Triton's own default up to 3.9 only."""
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return options if registers is None else options | {"maxnreg": registers}


FEWEST = 16  # channels that tensor cores take


def padded(size: int) -> int:
    """The channels a kernel works on for ``size`` of them: a power of two, and what tensor cores take at least."""
    return max(FEWEST, 1 << (size - 1).bit_length())


def few_channels(key_size: int, value_size: int) -> bool:
    """Whether a head has so few of either that the roundings of its factors do not average out. It is padded anyway."""
    return min(key_size, value_size) < FEWEST
