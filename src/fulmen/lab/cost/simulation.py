"""The warps of one multiprocessor, clock by clock.

Four schedulers issue at most one instruction in a clock each: of the warp that is ready first, the oldest among equals.
A warp is ready when its stall count is over, the scoreboards that its next instruction waits for are clear, and the
pipe of that instruction is free. Shared memory is one queue for all warps. A barrier waits for all warps of a program;
wgmma and copies to shared memory run on their own, and are waited for by groups.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fulmen.lab.cost.machines import OPERANDS_READ, STAGGER, Machine
from fulmen.lab.cost.operations import PIPES, Kind, Operation
from fulmen.lab.cost.sass import SCOREBOARDS

SCHEDULERS = 4
LONGEST = 20_000_000  # clocks; warps that wait at different barriers would never end
_TENSOR, _NO_PIPE = PIPES.index("tensor"), len(PIPES)
_NEVER = float("inf")


@dataclass(frozen=True)
class Run:
    """
    Attributes:
        clocks: of a round of all programs together.
        busy: share of the clocks in which each pipe is held, and shared memory, and in which schedulers issue.
        idle: share of the clocks in which a scheduler issues nothing, by what the warp that comes next waited for.
    """

    clocks: float
    busy: dict[str, float]
    idle: dict[str, float]

    @property
    def busiest(self) -> str:
        return max(self.busy, key=lambda name: self.busy[name])


class _Warp:
    __slots__ = (
        "asleep", "at", "boards", "copied", "copies", "groups", "pending", "pipe", "program", "ready", "round",
        "scheduler", "why",
    )  # fmt: skip

    def __init__(self, program: int, scheduler: int) -> None:
        self.program, self.scheduler = program, scheduler
        self.at = self.round = 0  # its next instruction, and rounds done
        self.ready, self.why, self.pipe = float(program * STAGGER), "start", _NO_PIPE
        self.boards: list[tuple[float, str]] = [(0.0, "")] * SCOREBOARDS  # when each is clear, and of what
        self.pending: dict[int, float] = {}  # when registers have what an mma computes
        self.groups: list[float] = []  # ends of groups of wgmma, and of copies
        self.copies: list[float] = []
        self.copied = 0.0
        self.asleep = False  # at a barrier


def simulate(
    code: Sequence[Operation], warps: int, programs: int, machine: Machine, rounds: int = 5, skipped: int = 2
) -> Run:
    """``programs`` of ``warps`` each run ``code`` over and over, until the slowest warp has done ``rounds`` of it, or
    all that often on average and once more (where a pipe is always busy, the youngest warps starve).

    Clocks count from when that many were ``skipped``. Those of a round are its instructions over what was issued in a
    clock, so it does not matter that programs drift apart.
    """
    return _Multiprocessor(code, warps, programs, machine).run(rounds, skipped)


class _Countdown:
    """Until every one of ``warps`` has done ``rounds``, or all together one more of each."""

    def __init__(self, warps: int, rounds: int) -> None:
        self.rounds, self.left, self.together = rounds, warps, warps * (rounds + 1)
        self.over = False

    def count(self, done: int) -> bool:
        """A warp has done so many; whether that was the last that it took."""
        before = self.over
        self.left -= done == self.rounds
        self.together -= 1
        self.over = self.left <= 0 or self.together <= 0
        return self.over and not before


class _Multiprocessor:
    def __init__(self, code: Sequence[Operation], warps: int, programs: int, machine: Machine) -> None:
        self.code, self.machine, self.warps = code, machine, warps
        # A wgmma is queued, and its warp goes on: it does not wait for its pipe.
        waits_for = [_NO_PIPE if op.pipe is None or op.kind is Kind.GROUP_MMA else op.pipe for op in code]
        self.waits_for = waits_for
        self.everyone = [_Warp(w // warps, w % SCHEDULERS) for w in range(warps * programs)]
        for warp in self.everyone:
            warp.pipe = waits_for[0]
        self.queues = [[w for w in self.everyone if w.scheduler == s] for s in range(SCHEDULERS)]
        self.free = [[0.0] * (len(PIPES) + 1) for _ in range(SCHEDULERS)]  # when each pipe is; the last always
        self.shared_free = 0.0
        self.wake = [0.0] * SCHEDULERS  # when each may have something to issue
        self.at_barrier: list[list[_Warp]] = [[] for _ in range(programs)]

    def run(self, rounds: int, skipped: int) -> Run:
        code, wake, last_issue = self.code, self.wake, [0] * SCHEDULERS
        unfinished, unskipped = (_Countdown(len(self.everyone), after) for after in (rounds, skipped))
        begin: int | None = None
        issued: Counter[int] = Counter()  # by instruction
        idle: Counter[str] = Counter()
        t = 0
        while not unfinished.over:
            for s in range(SCHEDULERS):
                if wake[s] > t:
                    continue
                free, first, warp = self.free[s], _NEVER, None
                for other in self.queues[s]:
                    if not other.asleep:
                        ready = other.ready
                        if free[other.pipe] > ready:
                            ready = free[other.pipe]
                        if ready < first:
                            warp, first = other, ready
                if warp is None or first > t:
                    wake[s] = first
                    continue
                if begin is not None:
                    issued[warp.at] += 1
                    if t > last_issue[s] + 1:
                        busy = free[warp.pipe] > warp.ready
                        idle[f"{PIPES[warp.pipe]} pipe" if busy else warp.why] += t - last_issue[s] - 1
                last_issue[s] = t
                wake[s] = t + 1
                self._issue(warp, t)
                if warp.at == 0:
                    if unskipped.count(warp.round):
                        begin = t
                    unfinished.count(warp.round)
            soonest = min(wake)
            t = max(t + 1, math.ceil(soonest)) if soonest < _NEVER else t + 1
            if t > LONGEST:
                raise RuntimeError("the simulation does not end: warps wait at different barriers")
        assert begin is not None
        clocks, count = t - begin, issued.total()
        held: defaultdict[str, float] = defaultdict(float)
        for i, times in issued.items():
            op = code[i]
            if op.pipe is not None:
                held[PIPES[op.pipe]] += times * op.hold
            held["shared"] += times * op.sectors
        shares = {pipe: held[pipe] / (SCHEDULERS * clocks) for pipe in PIPES}
        shares |= {"shared": held["shared"] / clocks, "issue": count / (SCHEDULERS * clocks)}
        waited = {why: gap / (SCHEDULERS * clocks) for why, gap in idle.most_common()}
        return Run(clocks * len(code) * len(self.everyone) / count, shares, waited)

    def _issue(self, warp: _Warp, t: int) -> None:
        op = self.code[warp.at]
        control, kind = op.instruction.control, op.kind
        free = self.free[warp.scheduler]
        done = t + op.latency
        taken = float(t)
        if kind is Kind.GROUP_MMA:  # it runs after those before it, as fast as shared memory lets it
            self.shared_free = max(self.shared_free, t) + op.sectors
            free[_TENSOR] = max(max(free[_TENSOR], t) + op.hold, self.shared_free)
            done = free[_TENSOR] + op.latency
            if op.closes:
                warp.groups.append(done)
        else:
            if op.pipe is not None:
                free[op.pipe] = t + op.hold
            if op.sectors:
                self.shared_free = max(self.shared_free, t) + op.sectors
                done = max(done, self.shared_free + op.latency - op.sectors)
                taken = self.shared_free
        if kind is Kind.MMA:
            for register in op.results:
                warp.pending[register] = done
        elif kind is Kind.COPY:
            warp.copied = max(warp.copied, done)
        elif kind is Kind.COPY_COMMIT:
            warp.copies.append(warp.copied)
        if control.result < SCOREBOARDS:
            warp.boards[control.result] = max(warp.boards[control.result], (done, kind.value))
        if control.operands < SCOREBOARDS:
            warp.boards[control.operands] = max(warp.boards[control.operands], (taken + OPERANDS_READ, kind.value))
        warp.at += 1
        if warp.at == len(self.code):
            warp.at = 0
            warp.round += 1
        self._ready_next(warp, t + (op.latency if kind is Kind.FENCE else control.stall))
        if kind is Kind.BARRIER:
            self._arrive(warp, t)

    def _ready_next(self, warp: _Warp, ready: float) -> None:
        """When, and because of what, the next instruction of ``warp`` may issue."""
        op, why = self.code[warp.at], "stall count"
        for board in op.instruction.control.waits:
            if warp.boards[board][0] > ready:
                ready, why = warp.boards[board]
        if pending := warp.pending:
            for register in op.sources:
                if register in pending and pending[register] > ready:
                    ready, why = pending[register], "mma result"
            if len(pending) > 128:
                warp.pending = {register: at for register, at in pending.items() if at > ready}
        if op.kind is Kind.GROUP_MMA_WAIT and len(warp.groups) > op.groups and warp.groups[-1 - op.groups] > ready:
            ready, why = warp.groups[-1 - op.groups], "wgmma result"
        if op.kind is Kind.COPY_WAIT and len(warp.copies) > op.groups and warp.copies[-1 - op.groups] > ready:
            ready, why = warp.copies[-1 - op.groups], "copy"
        warp.ready, warp.why, warp.pipe = ready, why, self.waits_for[warp.at]

    def _arrive(self, warp: _Warp, t: int) -> None:
        """At a barrier: the last warp of a program wakes the others."""
        group = self.at_barrier[warp.program]
        group.append(warp)
        warp.asleep = True
        if len(group) == self.warps:
            released = t + self.machine.barrier
            for other in group:
                other.asleep = False
                if released > other.ready:
                    other.ready, other.why = released, "barrier"
                self.wake[other.scheduler] = min(self.wake[other.scheduler], other.ready)
            self.at_barrier[warp.program] = []
