"""What the numbers say, in sentences. Every figure in them is computed from the cells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fulmen.lab.bench.report.groups import Group
from fulmen.lab.bench.results import run_of
from fulmen.lab.bench.tables import MARK

WHAT = {("fwd",): "forward", ("bwd",): "backward", ("fwd", "bwd"): "forward and backward"}


@dataclass(frozen=True)
class Duel:
    """A column of ours and one that is not, at the longest length that both ran."""

    group: Group
    modes: Sequence[str]
    n: int
    ours: str
    other: str

    def time(self, column: str) -> float:
        """Milliseconds."""
        return self.group.total(self.n, column, self.modes) or 0.0

    def told(self, column: str) -> str:
        """Its time, marked where it is noisy."""
        mark = MARK if self.group.noisy(self.n, column, self.modes) else ""
        return f"{milliseconds(self.time(column))}{mark}"

    @property
    def ratio(self) -> float:
        """How many times as fast ours is."""
        return self.time(self.other) / self.time(self.ours)

    @property
    def noisy(self) -> bool:
        return any(self.group.noisy(self.n, column, self.modes) for column in (self.ours, self.other))

    @property
    def owner(self) -> str:
        """Of the other, in words."""
        return self.group.owner(self.other).described


def duel(group: Group, modes: Sequence[str]) -> Duel | None:
    """The fastest that is not ours and our fastest, over the time of all ``modes``: of those that compute from the same
    tensors, if there are any. Where all are ours, the baseline is the other. None where there is no such pair."""
    known = {name: column for name in group.columns if (column := group.column(name)) is not None}
    mine = [name for name in known if group.owner(name).kind == "ours"]
    rivals = [name for name in known if group.owner(name).kind in ("theirs", "rendered")]
    rivals = rivals or [name for name in mine if name == group.baseline]
    pairs = [(a, b) for a in mine for b in rivals if a != b and run_of(a) == run_of(b)]
    alike = [(a, b) for a, b in pairs if known[a].takes == known[b].takes]
    for some in (alike, pairs):
        for n in reversed(group.lengths):
            times = {name: time for name in known if (time := group.total(n, name, modes)) is not None}
            ran = [pair for pair in some if pair[0] in times and pair[1] in times]
            if ran:
                best, other = min(ran, key=lambda pair: (times[pair[1]], times[pair[0]]))
                return Duel(group, modes, n, best, other)
    return None


def headline(groups: Iterable[Group]) -> tuple[Duel, int] | None:
    """The duel that a suite's card tells of, the median of its sections and sizes, and how many there are."""
    found = [one for group in groups if (one := duel(group, group.modes)) is not None]
    found.sort(key=lambda one: one.ratio)
    return (found[(len(found) - 1) // 2], len(found)) if found else None


def key_findings(group: Group) -> list[str]:
    """Markdown sentences on our best column and the best that is not ours: which is faster, from where on, how time
    grows, and who needs less memory."""
    found = duel(group, group.modes)
    if found is None:
        return fastest(group)
    sentences = [faster(found), crossing(found), growth(found), memory(found)]
    return [sentence for sentence in sentences if sentence]


def fastest(group: Group) -> list[str]:
    """Where there is nothing to compare with."""
    for n in reversed(group.lengths):
        times = {column: time for column in group.columns if (time := group.total(n, column)) is not None}
        if times:
            best = min(times, key=times.__getitem__)
            return [
                f"**{named(group, best)}** is fastest at {axis(group)}={n}: {milliseconds(times[best])} ({what(group)})"
            ]
    return []


def faster(found: Duel) -> str:
    group = found.group
    return (
        f"**{named(group, found.ours)}** takes {found.told(found.ours)} at {axis(group)}={found.n} ({what(group)}), "
        f"{named(group, found.other)} ({found.owner}) {found.told(found.other)}: **{found.ratio:.2f}x as fast**"
    )


def crossing(found: Duel) -> str:
    """From which length on ours is faster, or the other."""
    group, (ours, other) = found.group, (found.ours, found.other)
    times = [(n, group.total(n, ours), group.total(n, other)) for n in group.lengths]
    ratios = [(n, theirs / own) for n, own, theirs in times if own and theirs]
    first, then = (ours, other) if found.ratio > 1 else (other, ours)
    behind = [n for n, ratio in ratios if (ratio > 1) != (found.ratio > 1)]
    if not behind:
        return f"{first} is ahead of {then} at every length that both ran"
    ahead = next(n for n, _ in ratios if n > behind[-1])
    return f"{first} overtakes {then} between {axis(group)}={behind[-1]} and {ahead}"


def growth(found: Duel) -> str:
    """The power of n that time follows."""
    powers = {column: power(found.group, column) for column in (found.ours, found.other)}
    each = axis(found.group)
    parts = [f"{column} as {each}^{exponent:.2f}" for column, exponent in powers.items() if exponent is not None]
    return f"From the last two lengths measured, time grows: {', '.join(parts)}" if parts else ""


def memory(found: Duel) -> str:
    group = found.group
    mode = next((mode for mode in ("bwd", "fwd") if ("memory", mode) in group.tables), None)
    if mode is None:
        return ""
    for n in reversed(group.lengths):
        own, theirs = (group.value("memory", mode, n, column) for column in (found.ours, found.other))
        if own and theirs:
            than = f"{own / theirs:.2f} times the {theirs:.0f} MiB of {found.other}"
            return f"At {axis(group)}={n} {found.ours} needs {own:.0f} MiB ({WHAT[(mode,)]}), {than}"
    return ""


def power(group: Group, column: str) -> float | None:
    """Of n, from the last two lengths a column ran."""
    points = [(n, time) for n in group.lengths if (time := group.total(n, column)) is not None][-2:]
    if len(points) < 2:
        return None
    (n0, t0), (n1, t1) = points
    return math.log(t1 / t0) / math.log(n1 / n0)


def named(group: Group, column: str) -> str:
    """Its name for people, and the published one where that is another."""
    title = group.title(column)
    return title if title == column else f"{title} ({column})"


def what(group: Group) -> str:
    return WHAT.get(tuple(group.modes), "")


def axis(group: Group) -> str:
    return group.any_table.axis.upper()


def milliseconds(time: float) -> str:
    """Two digits at least: ``0.27 ms``, ``18.10 ms``, ``1793 ms``."""
    return f"{time:.0f} ms" if time >= 1000 else f"{time:.2f} ms" if time >= 0.1 else f"{time:.4f} ms"
