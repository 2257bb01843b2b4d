"""Results beside the published figures, and beside other results."""

from __future__ import annotations

from dataclasses import dataclass

from fulmen.lab.bench.published import PublishedTable, closest
from fulmen.lab.bench.results import Cell, Results, Table
from fulmen.lab.bench.tables import MARK, NOISE, UNITS

BROKEN = ("wrong", "failed")  # how the reasons begin for which a cell that should have a value has none
SAME = 0.03  # two runs of the same differ by this much even where their spreads do not touch
LONG, AGREED = 5.0, 0.1  # milliseconds; two runs of a machine that measures well agree within this share


def with_published(results: Results) -> str:
    """Every speed table's speedups over its baseline, measured and published."""
    parts = []
    for table in results.tables:
        published = closest(table) if table.metric == "speed" else None
        if published is not None:
            parts.append(_beside(table, published))
    return "\n\n".join(parts) or "no speed table of a published report is in these results"


def _beside(table: Table, published: PublishedTable) -> str:
    """One line for each length, and for each column two numbers: measured and published."""
    columns = [name for name in table.columns if name != table.baseline]
    rows = dict(published.rows)
    section = f" ({table.section})" if table.section else ""
    lines = [
        f"{table.title}{section}: times as fast as {table.baseline}, measured | published ({published.gpu}, "
        f"{published.title})",
        f"{table.axis:>8}" + "".join(f"{name:>18}" for name in columns),
    ]
    for n in sorted({*table.lengths, *rows}):
        cells = []
        for name in columns:
            row = rows.get(n, {})
            own, base = table.cell(n, name), table.cell(n, table.baseline)
            mark = MARK if any(cell.noisy for cell in (own, base) if cell) else " "
            ours = _over(base.value if base else None, own.value if own else None) + mark
            theirs = _over(row.get(table.baseline), row.get(name))
            cells.append(f"{ours:>8} | {theirs:>7}")
        lines.append(f"{n:>8}" + "".join(cells))
    if any(MARK in line for line in lines):
        lines.append(f"{MARK} {NOISE}")
    return "\n".join(lines)


def _over(base: float | None, own: float | None) -> str:
    return f"{base / own:.2f}" if base and own else "-"


@dataclass(frozen=True)
class Change:
    """One cell in two results."""

    table: Table
    before: Cell
    after: Cell

    @property
    def relative(self) -> float:
        """0.1: 10% more time or memory than before; infinite where there is no result any more."""
        if self.after.value is None:
            return float("inf")
        return (self.after.value or 0.0) / (self.before.value or 1.0) - 1

    @property
    def noisy(self) -> bool:
        return self.before.noisy or self.after.noisy

    @property
    def verdict(self) -> str:
        """ "same" unless one is slower than two sittings of the other, and by more than the noise."""
        if self.after.value is None:
            return "worse"
        if abs(self.relative) <= SAME or not self._apart:
            return "same"
        return "worse" if self.relative > 0 else "better"

    @property
    def _apart(self) -> bool:
        low, high = sorted((self.before, self.after), key=lambda cell: cell.value or 0.0)
        return _next(low) < (high.value or 0.0)

    @property
    def worse_by(self) -> float:
        """0 where it is not."""
        return self.relative if self.verdict == "worse" else 0.0


def changes(before: Results, after: Results) -> list[Change]:
    """Of all cells that have a value in both, and of those that had one and now fail or are wrong."""
    found = []
    tables = {(table.title, table.section): table for table in after.tables}
    for table in before.tables:
        other = tables.get((table.title, table.section))
        for cell in table.cells if other else []:
            now = other.cell(cell.n, cell.column) if other else None
            if cell.value and now is not None and (now.value or (now.skipped or "").startswith(BROKEN)):
                found.append(Change(table, cell, now))
    if not found:
        raise ValueError("the two results have no cell in common")
    return found


def agreement(found: list[Change]) -> str:
    """How far two runs of the same agree: of the times that are long enough to be measured well."""
    timed = [change for change in found if change.table.metric == "speed" and change.after.value is not None]
    long = [change for change in timed if (change.before.value or 0.0) > LONG]
    steady = [change for change in long if not change.noisy]
    within = sum(abs(change.relative) <= AGREED for change in steady)
    return (
        f"of {len(long)} cells above {LONG:g} ms, {len(long) - len(steady)} are marked as noisy; of the rest {within} "
        f"of {len(steady)} are within {AGREED:.0%}"
    )


def describe(found: list[Change]) -> str:
    """The changes that are beyond the noise, the largest first, how many there are of each kind, and how far runs
    agree."""
    lines = []
    for change in sorted(found, key=lambda change: -abs(change.relative)):
        if change.verdict != "same":
            table, cell = change.table, change.after
            section = f" ({table.section})" if table.section else ""
            unit = UNITS[table.metric]
            now = f"{unit} -> {cell.skipped}" if cell.value is None else f"-> {cell.value:.3f} {unit}"
            values = f"{change.before.value:.3f} {now}"
            where = f"{table.title}{section} {table.axis} = {cell.n} {cell.column}"
            mark = f" {MARK}" if change.noisy else ""
            lines.append(f"{change.verdict:<7}{change.relative:>+8.1%}  {where}: {values}{mark}")
    count = {verdict: sum(change.verdict == verdict for change in found) for verdict in ("better", "same", "worse")}
    lines.append(f"{len(found)} cells: " + ", ".join(f"{number} {verdict}" for verdict, number in count.items()))
    lines.append(agreement(found))
    if any(line.endswith(MARK) for line in lines):
        lines.append(f"{MARK} {NOISE}")
    return "\n".join(lines)


def _next(cell: Cell) -> float:
    """The next fastest sitting, which tells what the cell may be the next time."""
    return sorted(cell.sittings)[1] if len(cell.sittings) > 1 else cell.value or 0.0
