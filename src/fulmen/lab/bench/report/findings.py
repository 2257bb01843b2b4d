"""What the numbers say, in sentences. Every figure in them is computed from the cells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fulmen.lab.bench import suites
from fulmen.lab.bench.report.groups import Group
from fulmen.lab.bench.suite import Column

WHAT = {("fwd",): "forward", ("bwd",): "backward", ("fwd", "bwd"): "forward and backward"}


def key_findings(group: Group) -> list[str]:
    """Markdown sentences: who is fastest, from where on, how time grows, and who needs least memory."""
    found = [fastest(group), crossing(group), growth(group), memory(group)]
    return [sentence for sentence in found if sentence]


def fastest(group: Group) -> str:
    """At the longest length that the baseline ran, or that anything ran."""
    timed = [n for n in group.lengths if any(group.total(n, column) is not None for column in group.columns)]
    compared = [n for n in timed if group.total(n, group.baseline) is not None]
    if not timed:
        return ""
    n = (compared or timed)[-1]
    best, time = ranking(group, n)[0]
    sentence = f"**{best} is fastest** at {axis(group)}={n}: {milliseconds(time)} ({what(group)})"
    ratio = group.speedup(n, best)
    if ratio is not None and best != group.baseline:
        sentence += f", **{ratio:.2f}x faster** than {group.baseline}"
    return sentence


def crossing(group: Group) -> str:
    """From which length on the one that is fastest in the end is faster than the baseline."""
    compared = [n for n in group.lengths if group.total(n, group.baseline) is not None]
    if not compared:
        return ""
    best = ranking(group, compared[-1])[0][0]
    ratios = [(n, ratio) for n in compared if (ratio := group.speedup(n, best)) is not None]
    if best == group.baseline or not ratios:
        return ""
    behind = [n for n, ratio in ratios if ratio <= 1]
    if not behind:
        return f"{best} is ahead of {group.baseline} at every length that both ran"
    ahead = next(n for n in compared if n > behind[-1])
    return f"{best} overtakes {group.baseline} between {axis(group)}={behind[-1]} and {ahead}"


def growth(group: Group) -> str:
    """The power of n that time follows, of the fastest and of the baseline."""
    compared = [n for n in group.lengths if group.total(n, group.baseline) is not None]
    if len(compared) < 2:
        return ""
    best = ranking(group, compared[-1])[0][0]
    powers = {column: power(group, column) for column in dict.fromkeys((best, group.baseline))}
    parts = [f"{column} as {axis(group)}^{exponent:.2f}" for column, exponent in powers.items() if exponent is not None]
    return f"From the last two lengths measured, time grows: {', '.join(parts)}" if parts else ""


def memory(group: Group) -> str:
    mode = next((mode for mode in ("bwd", "fwd") if ("memory", mode) in group.tables), None)
    if mode is None:
        return ""
    table = group.tables["memory", mode]
    for n in reversed(table.lengths):
        sizes = {c: cell.value for c in table.columns if (cell := table.cell(n, c)) and cell.value is not None}
        if group.baseline in sizes and len(sizes) > 1:
            least = min(sizes, key=lambda column: sizes[column])
            share = 100 * (1 - sizes[least] / sizes[group.baseline])
            against = "" if least == group.baseline else f", {share:.0f}% less than {group.baseline}"
            return f"At {axis(group)}={n} {least} needs least memory ({WHAT[(mode,)]}): {sizes[least]:.0f} MiB{against}"
    return ""


def ranking(group: Group, n: int) -> list[tuple[str, float]]:
    """Columns with their total times, fastest first."""
    times = ((column, group.total(n, column)) for column in group.columns)
    return sorted(((column, time) for column, time in times if time is not None), key=lambda pair: pair[1])


def power(group: Group, column: str) -> float | None:
    """Of n, from the last two lengths a column ran."""
    points = [(n, time) for n in group.lengths if (time := group.total(n, column)) is not None][-2:]
    if len(points) < 2:
        return None
    (n0, t0), (n1, t1) = points
    return math.log(t1 / t0) / math.log(n1 / n0)


@dataclass(frozen=True)
class Duel:
    """Our fastest column and the fastest that is not ours, at the longest length that both ran."""

    n: int
    ours: Column
    ours_time: float  # milliseconds
    other: Column
    other_time: float
    owner: str  # of the other, in words

    @property
    def ratio(self) -> float:
        """How many times as fast ours is."""
        return self.other_time / self.ours_time


def duel(group: Group, modes: Sequence[str], versions: Mapping[str, str]) -> Duel | None:
    """Over the time of all ``modes`` together; None where they were not measured, or only for one side.

    ``versions`` are those of the packages of the run.
    """
    device = group.any_table.config.get("device", "cpu")
    columns = {column.name: column for column in suites.find(group.suite).sections.get(group.section, ())}
    owners = {name: column.owner(device) for name, column in columns.items()}
    for n in reversed(group.lengths):
        times = {name: time for name in columns if (time := group.total(n, name, modes)) is not None}
        mine = [name for name in times if owners[name].kind == "ours"]
        others = [name for name in times if owners[name].kind != "ours"]
        if mine and others:
            best, other = min(mine, key=times.__getitem__), min(others, key=times.__getitem__)
            owner = owners[other].described(versions.get(owners[other].package, ""))
            return Duel(n, columns[best], times[best], columns[other], times[other], owner)
    return None


def headline(groups: Iterable[Group], versions: Mapping[str, str]) -> tuple[Group, Duel] | None:
    """The duel of a suite that its card tells of: the one with the largest ratio."""
    found = [(group, one) for group in groups if (one := duel(group, group.modes, versions)) is not None]
    return max(found, key=lambda pair: pair[1].ratio, default=None)


def what(group: Group) -> str:
    return WHAT.get(tuple(group.modes), "")


def axis(group: Group) -> str:
    return group.any_table.axis.upper()


def milliseconds(time: float) -> str:
    """Two digits at least: ``0.27 ms``, ``18.10 ms``, ``1793 ms``."""
    return f"{time:.0f} ms" if time >= 1000 else f"{time:.2f} ms" if time >= 0.1 else f"{time:.4f} ms"
