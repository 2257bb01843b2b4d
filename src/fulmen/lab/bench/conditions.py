"""How busy a machine was with other work while it measured."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

QUIET = 0.3  # of a core: less than this taken by others does not matter
STOLEN = 0.02  # of the time: less than this given to other virtual machines does not matter
SLOWED = 1.2  # times: less does not matter
MOMENT = 0.5  # seconds


@dataclass
class Conditions:
    """As far as the system tells.

    Attributes:
        before, during: how many cores were busy with the work of other processes, a moment before the run began and
            on average while it ran.
        crowded: the most of a core that the others and the run's own threads wanted beyond the cores there are.
        stolen: the share of CPU time that went to other virtual machines while it ran.
        slowed: how many times longer than at best a fixed piece of work took, in a tenth of the looks at it. Who else
            runs on a core's other hyperthread, or uses up the power for a high clock, the system does not tell.
    """

    before: float | None = None
    during: float | None = None
    crowded: float | None = None
    stolen: float | None = None
    slowed: float | None = None

    @property
    def warning(self) -> str:
        """What disturbed the run, and what to do; empty if nothing did."""
        found = []
        if self.crowded is not None and self.crowded > QUIET:
            times = {"before it began": self.before, "while it ran": self.during}
            busy = [f"{cores:.1f} {when}" for when, cores in times.items() if cores is not None and cores > QUIET]
            found.append(f"cores busy with other work, {' and '.join(busy)}")
        if self.stolen is not None and self.stolen > STOLEN:
            found.append(f"{self.stolen:.0%} of the CPU time taken by other virtual machines")
        if self.slowed is not None and self.slowed > SLOWED:
            found.append(f"cores {self.slowed:.1f} times slower at times, by their clock or by others who share them")
        if not found:
            return ""
        return f"Measured under load: {'; '.join(found)}. Ratios are steadier than times; better: run it again."

    def worst(self, other: Conditions) -> Conditions:
        """Of two sittings of one run, the more disturbed figure of each kind."""
        both = zip(astuple(self), astuple(other), strict=True)
        return Conditions(*(max((x for x in pair if x is not None), default=None) for pair in both))


class Watch:
    """Conditions from now on; first it waits a moment, to see who else is at work."""

    def __init__(self) -> None:
        before = _Ticks.now()
        time.sleep(MOMENT)
        self._begin = _Ticks.now()
        self._before = _others(before, self._begin)
        self._pulses: list[float] = []

    def conditions(self) -> Conditions:
        """Until now; every call is one more look at how fast the machine is."""
        now = _Ticks.now()
        self._pulses.append(_pulse())
        slowed = None
        if len(self._pulses) > 1:
            slowed = round(statistics.quantiles(self._pulses, n=10, method="inclusive")[-1] / min(self._pulses), 2)
        during, room = _others(self._begin, now), (os.cpu_count() or 1) - torch.get_num_threads()
        known = [cores for cores in (self._before, during) if cores is not None]
        crowded = round(max(known) - room, 2) if known else None
        return Conditions(self._before, during, crowded, _stolen(self._begin, now), slowed)


def _pulse() -> float:
    """The seconds of a fixed piece of work of one thread, undisturbed by who else is on this core in between."""

    def once() -> float:
        start = time.perf_counter()
        sum(range(5000))
        return time.perf_counter() - start

    return min(once() for _ in range(7))


class _Ticks(NamedTuple):
    """CPU time of a machine since it was started."""

    all: int  # of every core, idle too
    busy: int
    stolen: int
    ours: int  # of this process and of those it has started

    @classmethod
    def now(cls) -> _Ticks | None:
        try:
            words = Path("/proc/stat").read_text().splitlines()[0].split()
            user, nice, system, idle, waiting, interrupts, soft, stolen = map(int, words[1:9])
            busy = user + nice + system + interrupts + soft
            return cls(busy + idle + waiting + stolen, busy, stolen, _own_ticks())
        except (OSError, ValueError):
            return None


def _own_ticks() -> int:
    parents, ticks = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        # Of a process itself and of children that have ended, in user and system mode.
        parents[int(folder.name)], ticks[int(folder.name)] = int(words[1]), sum(map(int, words[11:15]))

    def is_ours(process: int) -> bool:
        while process and process != os.getpid():
            process = parents.get(process, 0)
        return bool(process)

    return sum(spent for process, spent in ticks.items() if is_ours(process))


def _others(begin: _Ticks | None, end: _Ticks | None) -> float | None:
    """Cores that other processes kept busy."""
    if begin is None or end is None or end.all == begin.all:
        return None
    theirs = (end.busy - begin.busy) - (end.ours - begin.ours)
    return round(max(theirs, 0) * (os.cpu_count() or 1) / (end.all - begin.all), 2)


def _stolen(begin: _Ticks | None, end: _Ticks | None) -> float | None:
    if begin is None or end is None or end.all == begin.all:
        return None
    return round((end.stolen - begin.stolen) / (end.all - begin.all), 4)
