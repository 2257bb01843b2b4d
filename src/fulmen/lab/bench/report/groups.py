"""The tables of a run that belong together: one suite at one size, its speed and memory, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fulmen.lab.bench import suites
from fulmen.lab.bench.owners import Owner
from fulmen.lab.bench.results import Cell, Table, run_of, without_run
from fulmen.lab.bench.suite import Column

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

    def owner(self, name: str) -> Owner:
        return next((table.owner(name) for table in self.tables.values() if name in table.owners), Owner(""))

    def column(self, name: str) -> Column | None:
        """As its suite has it; None of one that this version does not know."""
        return suites.find(self.suite).column(name, self.section)

    def title(self, name: str) -> str:
        """A column's name for people."""
        column, run = self.column(name), run_of(name)
        return " ".join(part for part in (column.title if column else without_run(name), run and f"[{run}]") if part)

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

    def noisy(self, n: int, column: str, modes: Sequence[str] | None = None) -> bool:
        """Whether a time that goes into the total is."""
        cells = (self.cell("speed", mode, n, column) for mode in (self.modes if modes is None else modes))
        return any(cell.noisy for cell in cells if cell)

    def noisy_speedup(self, n: int, column: str) -> bool:
        return self.noisy(n, column) or self.noisy(n, self.baseline)

    def total(self, n: int, column: str, modes: Sequence[str] | None = None) -> float | None:
        """Milliseconds of these modes, or of all that were timed; None if one of them has no value."""
        times = [self.value("speed", mode, n, column) for mode in (self.modes if modes is None else modes)]
        return None if not times or None in times else sum(time for time in times if time is not None)

    def speedup(self, n: int, column: str) -> float | None:
        """Over the baseline, of the total."""
        base, own = self.total(n, self.baseline), self.total(n, column)
        return None if base is None or not own else base / own


def groups_of(tables: Iterable[Table]) -> list[Group]:
    """In the order of the tables."""
    groups: dict[tuple[str, str, str], Group] = {}
    for table in tables:
        sizes = table.title.partition(f"-{table.metric}-{table.mode}-")[2]
        group = groups.setdefault((table.suite, table.section, sizes), Group(table.suite, table.section, sizes))
        group.tables[table.metric, table.mode] = table
    return list(groups.values())
