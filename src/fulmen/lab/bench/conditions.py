"""How busy a machine was with other work while it measured."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

QUIET = 0.3  # of a core: less than this wanted by others does not matter
STOLEN = 0.02  # of the time: less than this given to other virtual machines does not matter


@dataclass
class Conditions:
    """As far as the system tells.

    Attributes:
        load_before, load_after: how many processes wanted to run, on average over the minute before the run began, and
            over its last; the latter has the run's own threads.
        threads: of the run.
        stolen: the share of CPU time that went to other virtual machines during the run.
    """

    load_before: float | None = None
    load_after: float | None = None
    threads: int = 1
    stolen: float | None = None

    @property
    def warning(self) -> str:
        """What disturbed the run, and what to do; empty if nothing did."""
        found = []
        if self.load_before is not None and self.load_before > QUIET:
            found.append(f"load {self.load_before:.1f} before it began")
        if self.load_after is not None and self.load_after > self.threads + QUIET:
            found.append(f"load {self.load_after:.1f} at its end, of which {self.threads} its own")
        if self.stolen is not None and self.stolen > STOLEN:
            found.append(f"{self.stolen:.0%} of the CPU time taken by other virtual machines")
        if not found:
            return ""
        return (
            f"This run was made under load: {'; '.join(found)}. Ratios are steadier than times; better: run it again."
        )


def load_average() -> float | None:
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None


class Stolen:
    """The share of CPU time that other virtual machines got since this was made."""

    def __init__(self) -> None:
        self._begin = _cpu_times()

    def share(self) -> float | None:
        now = _cpu_times()
        if self._begin is None or now is None:
            return None
        stolen, total = (after - before for before, after in zip(self._begin, now, strict=True))
        return round(stolen / total, 4) if total else 0.0


def _cpu_times() -> tuple[int, int] | None:
    """Stolen, and all, in the system's ticks."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0].split()
    except OSError:
        return None
    ticks = [int(word) for word in first[1:9]]
    return (ticks[7], sum(ticks)) if len(ticks) == 8 else None
