"""Tables as text, in the published form, and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import fields
from io import StringIO
from textwrap import fill

from fulmen.lab.bench.results import NOISY, Cell, Table

UNITS = {"speed": "ms", "memory": "MiB"}
DECIMALS = 6
MARK = "~"
NOISE = f"no second sitting came within {NOISY:.0%} of it: not to be trusted; repeat on a quiet machine"


def published_form(table: Table) -> str:
    """The table as the published reports print it. Where there is no value stands a mark, and below the table the
    reason; values that cannot be trusted are marked too."""
    notes = {kind: f"[{number}]" for number, kind in enumerate(skip_notes(table), start=1)}
    rows = {n: [_value(table, n, column, notes) for column in table.columns] for n in table.lengths}
    noisy = {(cell.n, cell.column) for cell in table.cells if cell.noisy}
    lines = [f"{table.title}:", *_aligned(table.axis, table.columns, rows, noisy)]
    lines += [fill(f"{notes[kind]} {note}", 120, subsequent_indent="    ") for kind, note in skip_notes(table).items()]
    if any(cell.noisy for cell in table.cells):
        lines.append(f"{MARK} {NOISE}")
    return "\n".join(lines)


def error_line(table: Table) -> str:
    """Each column's error, which was taken once, before anything was timed; to stand below the table, or empty."""
    if not table.errors:
        return ""
    where = f" ({table.checked})" if table.checked else ""
    each = ", ".join(f"{column} {table.errors[column]:.0e}" for column in table.columns if column in table.errors)
    return fill(f"off from float64{where}: {each}", 120, subsequent_indent="    ", break_on_hyphens=False)


def skip_notes(table: Table) -> dict[str, str]:
    """Why cells have no value, by the kind of reason. Where cells of a kind differ, the note tells of each."""
    kinds: dict[str, dict[tuple[int, str], str]] = {}
    for n in table.lengths:
        for column in table.columns:
            cell = table.cell(n, column)
            if cell is None or cell.value is None:
                kinds.setdefault(kind_of(reason(cell)), {})[n, column] = reason(cell)
    notes = {}
    for kind, reasons in kinds.items():
        details = [f"{column} at {n} {why.removeprefix(kind).strip(': ')}" for (n, column), why in reasons.items()]
        notes[kind] = next(iter(reasons.values())) if len({*reasons.values()}) == 1 else f"{kind}: {'; '.join(details)}"
    return notes


def kind_of(why: str) -> str:
    """What a reason has in common with others of its kind: all before its colon."""
    return why.partition(":")[0]


def reason(cell: Cell | None) -> str:
    """Of a cell without a value."""
    return (cell.skipped if cell else None) or "not run"


def speedup(table: Table, n: int, column: str) -> float | None:
    """How many times less than the baseline a column takes."""
    base, cell = table.cell(n, table.baseline), table.cell(n, column)
    return base.value / cell.value if base and cell and base.value and cell.value else None


def to_csv(tables: Iterable[Table]) -> str:
    """One line for each cell of every table, with all that is known of it."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    cell_fields = [field.name for field in fields(Cell)]
    head = ["suite", "section", "title", "metric", "mode", "unit", "owner", "error", "error_at", "noisy"]
    writer.writerow([*head, *cell_fields])
    for table in tables:
        about = [table.suite, table.section, table.title, table.metric, table.mode, UNITS[table.metric]]
        for cell in table.cells:
            error = table.errors.get(cell.column)
            said = [table.owner(cell.column).described, error, "" if error is None else table.checked]
            figures = (getattr(cell, name) for name in cell_fields)
            writer.writerow([*about, *said, "yes" if cell.noisy else "", *figures])
    return text.getvalue()


def markdown(header: list[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table, its rule as wide as the header, as the la3 report has it."""
    rule = "|" + "|".join("-" * (len(name) + 2) for name in header) + "|"
    return "\n".join([_markdown_row(header), rule, *map(_markdown_row, rows)])


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _value(table: Table, n: int, column: str, marks: dict[str, str]) -> float | str:
    cell = table.cell(n, column)
    return marks[kind_of(reason(cell))] if cell is None or cell.value is None else cell.value


def _aligned(
    axis: str, names: list[str], rows: Mapping[int, Sequence[float | str]], noisy: Container[tuple[int, str]]
) -> list[str]:
    """Lines of an index, the lengths and a column for each name: two spaces between, each as wide as it must be."""
    index = ["", *(str(i) for i in range(len(rows)))]
    columns = [[axis, *_decimal([float(n) for n in rows])]]
    for i, name in enumerate(names):
        figures = _decimal([row[i] for row in rows.values()])
        marks = [MARK if (n, name) in noisy else "" for n in rows]
        width = max(map(len, marks), default=0)
        marked = [figure + mark.ljust(width) for figure, mark in zip(figures, marks, strict=True)]
        columns.append([name + " " * width, *marked])
    widths = [max(map(len, column)) for column in columns]
    lines = zip(*columns, strict=True)
    padded = ([text.rjust(width) for text, width in zip(line, widths, strict=True)] for line in lines)
    return ["  ".join([number.ljust(len(index[-1])), *line]) for number, line in zip(index, padded, strict=True)]


def _decimal(values: Sequence[float | str]) -> list[str]:
    """Numbers with six decimals, less the zeros that all of them end with; one decimal stays."""
    numbers = [f"{value:.{DECIMALS}f}" for value in values if not isinstance(value, str)]
    zeros = min((len(number) - len(number.rstrip("0")) for number in numbers), default=0)
    decimals = max(1, DECIMALS - zeros)
    return [value if isinstance(value, str) else f"{value:.{decimals}f}" for value in values]
