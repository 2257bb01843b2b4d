"""An instruction as a multiprocessor sees it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from fulmen.lab.cost.machines import GROUP_MACS, SECTOR_BYTES, Machine
from fulmen.lab.cost.sass import Instruction

PIPES = ("tensor", "fma", "alu", "xu", "mio")  # of a scheduler; "xu": special functions, "mio": to memory


class Kind(Enum):
    """What the simulation, or a list of reasons for idle clocks, tells apart."""

    ARITHMETIC = "arithmetic"
    SPECIAL = "special function"
    MMA = "mma"
    GROUP_MMA = "wgmma"
    GROUP_MMA_WAIT = "wgmma wait"
    SHARED = "shared memory"
    SHUFFLE = "shuffle"
    LOAD = "load"
    STORE = "store"
    COPY = "copy"  # from global to shared memory, asynchronously
    COPY_COMMIT = "copy commit"
    COPY_WAIT = "copy wait"
    CONSTANT = "constant"
    BARRIER = "barrier"
    FENCE = "fence"


@dataclass(frozen=True, slots=True)
class Operation:
    """
    Attributes:
        pipe: index in :data:`PIPES`; None for what only the scheduler sees.
        hold: clocks that it holds its pipe.
        latency: clocks until its result is there; 0 where ptxas knows it, and the stall count has it.
        sectors: clocks of the multiprocessor's shared memory, or of its way to the L2.
        bytes: that a warp requests of the L2.
        sources, results: registers. Those of mma are interlocked by the hardware, without a scoreboard.
        closes: whether it is the last wgmma of a group.
        groups: that a wait leaves running.
    """

    instruction: Instruction
    kind: Kind = Kind.ARITHMETIC
    pipe: int | None = PIPES.index("alu")
    hold: float = 2
    latency: float = 0
    sectors: float = 0
    bytes: int = 0
    sources: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    closes: bool = False
    groups: int = 0


def operations(code: Sequence[Instruction], machine: Machine) -> list[Operation]:
    known: dict[Instruction, Operation] = {}
    return [known[i] if i in known else known.setdefault(i, operation(i, machine)) for i in code]


def operation(instruction: Instruction, machine: Machine) -> Operation:
    made = _MAKERS.get(instruction.name, _plain)(Operation(instruction), machine)
    if made.kind is Kind.MMA:
        return made
    return replace(made, sources=tuple(int(r) for r in re.findall(r"\bR(\d+)\b", instruction.text)))


def _plain(op: Operation, machine: Machine) -> Operation:
    return op


def _fma(op: Operation, machine: Machine) -> Operation:
    return replace(op, pipe=PIPES.index("fma"), hold=machine.fma)


def _integer_fma(op: Operation, machine: Machine) -> Operation:
    return replace(op, pipe=PIPES.index("fma"))


def _special(op: Operation, machine: Machine) -> Operation:
    return replace(op, kind=Kind.SPECIAL, pipe=PIPES.index("xu"), hold=8, latency=machine.special)


def _mma(op: Operation, machine: Machine) -> Operation:
    """HMMA.16816.F32.BF16 D, A, B, C: registers of 4, 4, 2 and 4."""
    opcode, text = op.instruction.opcode, op.instruction.text
    half = "1688" in opcode and "TF32" not in opcode
    names = re.findall(r"\b(RZ|R\d+)\b", text)[:4]
    result, *factors = (
        () if name == "RZ" else tuple(range(int(name[1:]), int(name[1:]) + count))
        for name, count in zip(names, (4, 4, 2, 4), strict=False)
    )
    return replace(
        op, kind=Kind.MMA, pipe=PIPES.index("tensor"), hold=machine.mma_hold / (2 if half else 1), latency=machine.mma,
        results=result, sources=tuple(register for factor in factors for register in factor),
    )  # fmt: skip


def _group_mma(op: Operation, machine: Machine) -> Operation:
    """HGMMA.64xNx16: a warp's share of what the four of its group read is B, and A unless it is in registers."""
    opcode, text = op.instruction.opcode, op.instruction.text
    size = re.search(r"(\d+)x(\d+)x(\d+)", opcode)
    if size is None or machine.group_mma is None:
        raise ValueError(f"{machine.name} has no {opcode}")
    m, n, k = map(int, size.groups())
    in_registers = re.search(r"\bR\d+, R\d+, gdesc", text) is not None
    read = 2 * k * (n if in_registers else n + m)
    return replace(
        op, kind=Kind.GROUP_MMA, pipe=PIPES.index("tensor"), hold=16 * n * k / GROUP_MACS, latency=machine.group_mma,
        sectors=read / 4 / SECTOR_BYTES, closes="gsb0" in text,
    )  # fmt: skip


def _shared(op: Operation, machine: Machine) -> Operation:
    """Local memory, where registers are spilled to, is taken for shared memory: it stays in the L1 cache."""
    width = _width(op)
    return replace(
        op, kind=Kind.SHARED, pipe=PIPES.index("mio"), sectors=width, latency=machine.shared_load + width
    )  # fmt: skip


def _matrix(op: Operation, machine: Machine) -> Operation:
    sectors = {"2": 2, "4": 4}.get(op.instruction.opcode.split(".")[-1], 1)
    return replace(
        op, kind=Kind.SHARED, pipe=PIPES.index("mio"), sectors=sectors, latency=machine.shared_load + 4
    )  # fmt: skip


def _shuffle(op: Operation, machine: Machine) -> Operation:
    return replace(op, kind=Kind.SHUFFLE, pipe=PIPES.index("mio"), sectors=1, latency=machine.shuffle)


def _global(kind: Kind) -> Callable[[Operation, Machine], Operation]:
    def make(op: Operation, machine: Machine) -> Operation:
        width = _width(op)
        latency = machine.store if kind is Kind.STORE else machine.load
        return replace(
            op, kind=kind, pipe=PIPES.index("mio"), sectors=width, bytes=width * SECTOR_BYTES, latency=latency
        )

    return make


def _width(op: Operation) -> int:
    """In words of 4 bytes for each thread."""
    modifiers = op.instruction.opcode.split(".")
    return 4 if "128" in modifiers else 2 if "64" in modifiers else 1


def _constant(op: Operation, machine: Machine) -> Operation:
    return replace(op, kind=Kind.CONSTANT, latency=machine.constant)


def _of_scheduler(op: Operation) -> Operation:
    return replace(op, pipe=None, hold=1)


def _barrier(op: Operation, machine: Machine) -> Operation:
    return replace(_of_scheduler(op), kind=Kind.BARRIER)


def _fence(op: Operation, machine: Machine) -> Operation:
    return replace(_of_scheduler(op), kind=Kind.FENCE, latency=machine.fence)


def _copy_commit(op: Operation, machine: Machine) -> Operation:
    return replace(_of_scheduler(op), kind=Kind.COPY_COMMIT)


def _copy_wait(op: Operation, machine: Machine) -> Operation:
    """DEPBAR.LE SB0, 0x1 leaves one group of copies running; without LE it waits for nothing of theirs."""
    kind = Kind.COPY_WAIT if "LE" in op.instruction.opcode else Kind.ARITHMETIC
    return replace(_of_scheduler(op), kind=kind, groups=_number(r"SB\d+, 0x([0-9a-f]+)", op))


def _group(op: Operation, machine: Machine) -> Operation:
    """WARPGROUP.DEPBAR.LE gsb0, 0x1 leaves one group of wgmma running; others only arrive."""
    kind = Kind.GROUP_MMA_WAIT if "DEPBAR" in op.instruction.opcode else Kind.ARITHMETIC
    return replace(_of_scheduler(op), kind=kind, groups=_number(r"gsb0, 0x([0-9a-f]+)", op))


def _uniform(op: Operation, machine: Machine) -> Operation:
    return replace(op, hold=1)


def _number(pattern: str, op: Operation) -> int:
    found = re.search(pattern, op.instruction.text)
    return int(found[1], 16) if found else 0


_MAKERS: dict[str, Callable[[Operation, Machine], Operation]] = {
    **dict.fromkeys(("FADD", "FMUL", "FFMA"), _fma),
    "IMAD": _integer_fma,
    **dict.fromkeys(("MUFU", "F2F", "I2F", "F2I"), _special),
    "HMMA": _mma,
    "HGMMA": _group_mma,
    **dict.fromkeys(("LDS", "STS", "LDL", "STL"), _shared),
    **dict.fromkeys(("LDSM", "STSM"), _matrix),
    **dict.fromkeys(("SHFL", "REDUX"), _shuffle),
    "LDG": _global(Kind.LOAD),
    "LDGSTS": _global(Kind.COPY),
    **dict.fromkeys(("STG", "RED", "ATOMG"), _global(Kind.STORE)),
    "BAR": _barrier,
    "WARPGROUP": _group,
    **dict.fromkeys(("MEMBAR", "FENCE"), _fence),
    "LDGDEPBAR": _copy_commit,
    "DEPBAR": _copy_wait,
    **dict.fromkeys(("LDC", "ULDC", "S2R", "S2UR", "R2UR", "LDCU"), _constant),
    **dict.fromkeys(
        ("NOP", "BRA", "EXIT", "WARPSYNC", "UMOV", "UIADD3", "USHF", "ULOP3", "UIMAD", "ULEA", "USEL", "UISETP"),
        _uniform,
    ),
}
