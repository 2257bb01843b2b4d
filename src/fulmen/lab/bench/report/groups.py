"""The tables of a run that belong together: one suite at one size, its speed and memory, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fulmen.lab.bench import suites
from fulmen.lab.bench.owners import Owner, ours
from fulmen.lab.bench.results import Cell, Table

MODES = ("fwd", "bwd")


@dataclass
class Group:
    suite: str
    section: str
    sizes: str  # as in the titles: "batch4-head32-dim128-bf16"
    tables: dict[tuple[str, str], Table] = field(default_factory=dict)  # by metric and mode

    @property
    def label(self) -> str:
        return f"{self.section}, {self.sizes}" if self.section else self.sizes

    @property
    def any_table(self) -> Table:
        return next(iter(self.tables.values()))

    @property
    def baseline(self) -> str:
        return self.any_table.baseline

    @property
    def columns(self) -> list[str]:
        """Of all tables; memory tables may have fewer than speed tables."""
        return list(dict.fromkeys(column for table in self.tables.values() for column in table.columns))

    @property
    def modes(self) -> list[str]:
        """That were timed."""
        return [mode for mode in MODES if ("speed", mode) in self.tables]

    @property
    def lengths(self) -> list[int]:
        return sorted({n for table in self.tables.values() for n in table.lengths})

    def cell(self, metric: str, mode: str, n: int, column: str) -> Cell | None:
        table = self.tables.get((metric, mode))
        return None if table is None else table.cell(n, column)

    def value(self, metric: str, mode: str, n: int, column: str) -> float | None:
        cell = self.cell(metric, mode, n, column)
        return None if cell is None else cell.value

    def total(self, n: int, column: str, modes: Sequence[str] | None = None) -> float | None:
        """Milliseconds of these modes, or of all that were timed; None if one of them has no value."""
        times = [self.value("speed", mode, n, column) for mode in (self.modes if modes is None else modes)]
        return None if not times or None in times else sum(time for time in times if time is not None)

    def speedup(self, n: int, column: str) -> float | None:
        """Over the baseline, of the total."""
        base, own = self.total(n, self.baseline), self.total(n, column)
        return None if base is None or not own else base / own


def owner_of(group: Group, column: str) -> Owner:
    """Of one that this version does not know: ours, as nobody else's name is to be put to it."""
    known = suites.find(group.suite).column(column, group.section)
    device = group.any_table.config.get("device", "cpu")
    return ours(device) if known is None else known.owner(device)


def groups_of(tables: Iterable[Table]) -> list[Group]:
    """In the order of the tables."""
    groups: dict[tuple[str, str, str], Group] = {}
    for table in tables:
        sizes = table.title.partition(f"-{table.metric}-{table.mode}-")[2]
        group = groups.setdefault((table.suite, table.section, sizes), Group(table.suite, table.section, sizes))
        group.tables[table.metric, table.mode] = table
    return list(groups.values())
