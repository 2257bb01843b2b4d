"""From one multiprocessor to a launch: occupancy, waves, and the memory that everybody shares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from fulmen.lab.cost.machines import (
    LAUNCH,
    PROGRAM_SHARED,
    PROGRAMS,
    REGISTERS,
    REGISTERS_AT_ONCE,
    STREAMED,
    WARPS,
    Machine,
)
from fulmen.lab.cost.operations import operations
from fulmen.lab.cost.sass import Code, Instruction, Loop
from fulmen.lab.cost.simulation import Run, simulate
from fulmen.lab.cost.work import Trips, Work

FEW_TRIPS = 8  # up to here a program is simulated whole, with more its main loop and the rest apart
FEW_WAVES = 4  # below, the last one counts as a whole one: programs are then few and long
MOST_INSTRUCTIONS = 20_000  # of a warp in one round: loops inside others that make more are counted once


class NotModelledError(ValueError):
    """Why the model has nothing to say."""


@dataclass(frozen=True)
class Kernel:
    """What was compiled; ``shared`` in bytes and ``registers`` of a thread."""

    code: Code
    machine: Machine
    warps: int
    shared: int
    registers: int

    @property
    def resident(self) -> int:
        """Programs that fit a multiprocessor at once."""
        registers = ceil(self.registers / REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE * 32 * self.warps
        by_shared = self.machine.shared // (self.shared + PROGRAM_SHARED)
        return min(REGISTERS // registers, by_shared, WARPS // self.warps, PROGRAMS)

    def at_once(self, programs: int) -> int:
        """Programs of a launch that a multiprocessor has at once."""
        return max(1, min(self.resident, ceil(programs / self.machine.multiprocessors)))


class Phases(NamedTuple):
    """A program: ``trips`` of the main loop's ``body``, and what comes before and after it.

    ``counted_once``: how many loops inside others may run more often than the model knows.
    """

    ends: list[Instruction]
    body: list[Instruction]
    trips: int
    counted_once: int


def phases(code: Code, loops: tuple[Trips, ...]) -> Phases:
    """``loops`` are those of the source. The main one is what most instructions are run in; where code and source have
    not the same loops, the largest, of the one as of the other.

    Raises:
        NotModelledError: it is not known how often the main loop runs, or one that is larger.
    """
    if not code.loops:
        return Phases(list(code.instructions[: code.end]), [], 0, 0)
    largest = max(code.loops, key=lambda loop: loop.size)
    if len(code.loops) < len(loops):  # the compiler makes no loop of a single trip
        loops = tuple(loop for loop in loops if loop.count != 1)
    if len(code.loops) == len(loops):
        trips = dict(zip(code.loops, loops, strict=True))
    else:
        trips = {largest: max(loops, key=lambda loop: loop.lines)} if loops else {}
    main = max(trips, key=lambda loop: loop.size * (trips[loop].count or 0), default=None)
    if main is None:
        raise NotModelledError("its code has a loop that its source does not have")
    count = trips[main].count
    if count is None or trips[largest].count is None:
        raise NotModelledError("how often its loop runs is in a tensor")
    others = [loop for loop in code.loops if loop != main]
    unknown = _Unknown()
    before = list(_unrolled(code, 0, main.first, [loop for loop in others if loop.first < main.first], trips, unknown))
    after = list(
        _unrolled(code, main.last + 1, code.end, [loop for loop in others if loop.first > main.last], trips, unknown)
    )
    inner = _pairs(main.inner, trips[main].inner)
    body = list(_unrolled(code, main.first, main.last + 1, list(main.inner), inner, unknown))
    return Phases(before + after, body, count, unknown.loops)


class _Unknown:
    loops = 0


def _pairs(loops: tuple[Loop, ...], trips: tuple[Trips, ...]) -> dict[Loop, Trips]:
    return dict(zip(loops, trips, strict=True)) if len(loops) == len(trips) else {}


def _unrolled(
    code: Code, first: int, end: int, loops: list[Loop], trips: dict[Loop, Trips], unknown: _Unknown
) -> Iterator[Instruction]:
    """Instructions from ``first`` to ``end``, with ``loops`` as often as they run."""
    for loop in loops:
        yield from code.instructions[first : loop.first]
        found = trips.get(loop)
        inner = _pairs(loop.inner, found.inner if found else ())
        once = list(_unrolled(code, loop.first, loop.last + 1, list(loop.inner), inner, unknown))
        known = found is not None and found.count is not None and found.count * len(once) <= MOST_INSTRUCTIONS
        unknown.loops += not known
        yield from once * (found.count if known and found and found.count is not None else 1)
        first = loop.last + 1
    yield from code.instructions[first:end]


class Simulated(NamedTuple):
    """The parts of a program on a multiprocessor with as many programs as a launch puts there. Where ``ends`` is None,
    ``main`` is all of it."""

    main: Run
    ends: Run | None


def simulated(kernel: Kernel, parts: Phases, programs: int) -> Simulated:
    """The expensive part: about a second. ``programs`` are those of the launch."""
    at_once = kernel.at_once(programs)

    def run(code: list[Instruction], rounds: int, skipped: int) -> Run:
        return simulate(operations(code, kernel.machine), kernel.warps, at_once, kernel.machine, rounds, skipped)

    if parts.trips <= FEW_TRIPS:
        return Simulated(run(parts.ends + parts.body * parts.trips, 4, 1), None)
    return Simulated(run(parts.body, 5, 2), run(parts.ends, 2, 1))


@dataclass(frozen=True)
class Cost:
    """A modelled launch, not a measured one. Times are in milliseconds.

    Attributes:
        time: the longest of the three below, and a launch.
        multiprocessors: what the programs take on the multiprocessors, with memory as fast as they like.
        memory: what the operands take of the memory's bandwidth.
        l2: what all that is requested takes of the L2 cache's bandwidth.
        cycles: of a multiprocessor for each token and head; None where operands have no tokens.
        clocks: of one trip of the main loop for all programs of a multiprocessor (of all of them, with few trips).
        waves: of programs.
        programs: that a multiprocessor has at once.
        occupancy: its warps then, over the most it could have.
        busy: share of the clocks in which each pipe is held.
        idle: share in which a scheduler issues nothing, by reason.
        counted_once: loops inside others whose trips are not known.
    """

    time: float
    multiprocessors: float
    memory: float
    l2: float
    cycles: float | None
    clocks: float
    waves: float
    programs: int
    occupancy: float
    busy: dict[str, float]
    idle: dict[str, float]
    counted_once: int

    @property
    def busiest(self) -> str:
        """The pipe that is held most, or the memory where this is what takes longest."""
        longest = max(self.multiprocessors, self.memory, self.l2)
        if longest == self.multiprocessors:
            return max(self.busy, key=lambda pipe: self.busy[pipe])
        return "memory" if longest == self.memory else "l2"

    @property
    def share(self) -> float:
        """Of the time in which :attr:`busiest` is."""
        return self.busy.get(self.busiest, 1.0)


def estimate(kernel: Kernel, work: Work, parts: Phases, found: Simulated, programs: int) -> Cost:
    """Of a launch of ``programs``."""
    machine, at_once = kernel.machine, kernel.at_once(programs)
    waves = programs / (machine.multiprocessors * at_once)
    waves = ceil(waves) if waves < FEW_WAVES else waves
    clocks = found.main.clocks
    if found.ends is not None:
        clocks = parts.trips * clocks + found.ends.clocks
    in_ends, in_body = (sum(op.bytes for op in operations(code, machine)) for code in (parts.ends, parts.body))
    requested = kernel.warps * programs * (in_ends + in_body * parts.trips)
    busy = waves * clocks / machine.clock
    memory = min(work.bytes, requested) / (STREAMED * machine.bandwidth)
    l2 = requested / machine.l2_bandwidth
    seconds = max(busy, memory, l2)
    cycles = seconds * machine.clock * machine.multiprocessors / work.tokens if work.tokens else None
    occupancy = at_once * kernel.warps / WARPS
    return Cost(
        1e3 * (seconds + LAUNCH), 1e3 * busy, 1e3 * memory, 1e3 * l2, cycles, found.main.clocks, waves, at_once,
        occupancy, found.main.busy, found.main.idle, parts.counted_once,
    )  # fmt: skip
