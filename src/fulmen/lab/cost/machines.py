"""The cards that are modelled, with every constant of the model."""

from __future__ import annotations

from dataclasses import dataclass

REGISTERS = 65536  # of 32 bits, of a multiprocessor
REGISTERS_AT_ONCE = 8  # of a thread are given out
WARPS, PROGRAMS = 64, 32  # that a multiprocessor holds at most
PROGRAM_SHARED = 1024  # bytes of shared memory that each program takes beyond its own
SECTOR_BYTES = 128  # that shared memory moves in a clock, and that a warp requests with 4 bytes for each thread


@dataclass(frozen=True)
class Machine:
    """
    Rates are those of data sheets and of micro-benchmarks. Latencies are in clocks, from when an instruction is issued
    to when its result may be used; papers on Ampere and Hopper have them (arXiv:2402.13499, arXiv:2501.12084).

    Attributes:
        name: of the card.
        multiprocessors: and their clock in Hz, the boost one.
        bandwidth: of the memory in bytes per second, by the data sheet; STREAMED of it is what kernels reach.
        l2_bandwidth: bytes per second that all multiprocessors together get from the L2 cache.
        shared: bytes of shared memory of a multiprocessor.
        load: latency of a load, between that of an L2 hit (260) and of a busy memory (600 to 700).
        mma: latency of a product of a warp, and clocks that one of 16×8×16 holds a scheduler's tensor core. On an H100
            these reach 62% of the rate that products of warp groups have.
        group_mma: latency of a product of a warp group (wgmma); None where there are none.
        fma: clocks that a float32 instruction of a warp holds its pipe: 16 lanes on an A100, 32 on an H100.
    """

    name: str
    multiprocessors: int
    clock: float
    bandwidth: float
    l2_bandwidth: float
    shared: int
    load: int
    shared_load: int
    mma: int
    mma_hold: float
    group_mma: int | None
    fma: int

    store: int = 30
    shuffle: int = 24
    special: int = 20  # exp, log, reciprocals, conversions
    constant: int = 25  # constants, special registers
    barrier: int = 22
    fence: int = 20


MACHINES = {
    "sm_80": Machine(
        "A100", 108, 1.41e9, 2.039e12, 4.4e12, 164 * 1024,
        load=450, shared_load=27, mma=26, mma_hold=8.0, group_mma=None, fma=2,
    ),
    "sm_90": Machine(
        "H100", 132, 1.755e9, 3.35e12, 5.7e12, 228 * 1024,
        load=500, shared_load=29, mma=32, mma_hold=6.4, group_mma=35, fma=1,
    ),
}  # fmt: skip

GROUP_MACS = 512  # multiply-adds that wgmma makes in a clock on a scheduler's tensor core
STREAMED = 0.85  # of a memory's bandwidth
LAUNCH = 3e-6  # seconds from the end of a kernel to the start of the next one in a stream
OPERANDS_READ = 12  # clocks until an instruction has read its registers
STAGGER = 150  # clocks between the starts of the programs of a multiprocessor
