"""What a benchmark run found: cells in tables, kept in one JSON file that is rewritten after every cell."""

from __future__ import annotations

import datetime
import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from fulmen.lab.bench.conditions import Conditions
from fulmen.lab.bench.owners import Owner
from fulmen.lab.files import write_json

FORMAT = 2
NOISY = 0.1  # if every other sitting of a cell is slower than its fastest by more than this, it cannot be trusted
SETTLED, ENOUGH = 0.03, 3  # a cell needs no further sitting once two of this many are as close as this
OVER_BUDGET = "over the time budget"  # how the reason begins of a cell that was left out for time
Record = TypeVar("Record")


@dataclass
class Cell:
    """One column at one length. Either ``value`` or ``skipped`` says what became of it."""

    n: int  # the length: n or m
    column: str
    value: float | None = None  # milliseconds (of the fastest sitting) or MiB
    p20: float | None = None  # of the sittings
    p80: float | None = None
    sittings: list[float] = field(default_factory=list)  # milliseconds: the median of each
    first_call: float | None = None  # milliseconds of the first call ever, compilation included
    inputs: float | None = None  # MiB, in memory tables
    outputs: float | None = None
    workspace: float | None = None
    skipped: str | None = None  # why there is no value, in words

    def sit(self, median: float) -> None:
        """Take in another sitting. What else a machine does only ever adds time, so the fastest tells of the cell."""
        self.sittings.append(median)
        ordered, fifth = sorted(self.sittings), len(self.sittings) // 5
        self.value, self.p20, self.p80 = ordered[0], ordered[fifth], ordered[-1 - fifth]

    @property
    def spread(self) -> float | None:
        """From p20 to p80, as a share of the value."""
        if not self.value or self.p20 is None or self.p80 is None:
            return None
        return (self.p80 - self.p20) / self.value

    @property
    def lead(self) -> float:
        """By what share the next fastest sitting was slower than the fastest; infinite where there is none."""
        ordered = sorted(self.sittings)
        return ordered[1] / ordered[0] - 1 if len(ordered) > 1 else float("inf")

    @property
    def noisy(self) -> bool:
        """Whether no other sitting, a while before or after, came close to the fastest."""
        return bool(self.sittings) and self.lead > NOISY

    @property
    def settled(self) -> bool:
        return len(self.sittings) >= ENOUGH and self.lead <= SETTLED


@dataclass
class Table:
    """One published table, or the same at other sizes."""

    suite: str
    title: str  # as published: "lasd-speed-fwd-batch4-head32-dim128-bf16"
    section: str  # where titles repeat: "no cache"; empty otherwise
    metric: str  # "speed" or "memory"
    mode: str  # "fwd" or "bwd"
    axis: str  # "n" or "m", the head of the first column
    columns: list[str]  # in the published order
    baseline: str  # the column that speedups are relative to
    config: dict[str, Any]  # batch, heads, dim, dtype ...
    cells: list[Cell] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)  # of columns, relative to the float64 reference's largest
    checked: str = ""  # the sizes at which they were taken
    owners: dict[str, Owner] = field(default_factory=dict)  # of the columns, on the machine that ran them

    def owner(self, column: str) -> Owner:
        return self.owners.get(column, Owner(""))

    def cell(self, n: int, column: str) -> Cell | None:
        return next((cell for cell in self.cells if (cell.n, cell.column) == (n, column)), None)

    @property
    def lengths(self) -> list[int]:
        return sorted({cell.n for cell in self.cells})


@dataclass
class Results:
    environment: dict[str, Any]  # fulmen.lab.environment.environment()
    options: dict[str, Any]  # what was requested: device, dtype, preset, threads ...
    started: str  # ISO 8601
    finished: str | None = None  # None: interrupted, or still running
    tables: list[Table] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # where the time of the run went
    conditions: Conditions = field(default_factory=Conditions)

    @property
    def warnings(self) -> list[str]:
        """What disturbed it."""
        return [warning] if (warning := self.conditions.warning) else []

    @property
    def filled(self) -> list[Table]:
        """The tables that have cells; a run that was stopped may have begun others."""
        return [table for table in self.tables if table.cells]

    def save(self, path: Path) -> None:
        write_json(path, {"format": FORMAT} | asdict(self))


def load(path: Path) -> Results:
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
        if "format" not in content:
            raise ValueError("it has no field 'format'")
        if content.pop("format") != FORMAT:
            raise ValueError("it was written by another version of fulmen")
        results = _record(Results, content, "")
        _has(results.environment, "environment", "fulmen", "torch", "cpu", "gpus")
        _has(results.environment["cpu"], "environment.cpu", "model", "threads")
        results.conditions = _record(Conditions, content.get("conditions", {}), "conditions")
        results.tables = [_record(Table, table, f"tables[{i}]") for i, table in enumerate(content.get("tables", []))]
        for i, table in enumerate(results.tables):
            _has(table.config, f"tables[{i}].config", "batch", "heads", "dim", "dtype")
            table.cells = [_record(Cell, cell, f"tables[{i}].cells[{j}]") for j, cell in enumerate(table.cells)]
            owners = table.owners.items()
            table.owners = {name: _record(Owner, owner, f"tables[{i}].owners.{name}") for name, owner in owners}
        return results
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a result file of `fulmen bench`: {error}") from error


def _record(kind: type[Record], content: Any, where: str) -> Record:
    """One of these dataclasses; ValueError names the field that is missing or unknown."""
    known = fields(kind)  # type: ignore[arg-type]  # one of the dataclasses of this module
    needed = (each for each in known if each.default is MISSING and each.default_factory is MISSING)
    _has(content, where, *(each.name for each in needed))
    if unknown := content.keys() - {each.name for each in known}:
        raise ValueError(f"it has an unknown field {min(unknown)!r}{_in(where)}")
    return kind(**content)


def _has(content: Any, where: str, *names: str) -> None:
    """ValueError unless it is an object with these fields."""
    if not isinstance(content, dict):
        raise ValueError(f"there is no object{_in(where)}")
    if missing := [name for name in names if name not in content]:
        raise ValueError(f"it has no field {missing[0]!r}{_in(where)}")


def _in(where: str) -> str:
    return f" in {where}" if where else ""


def of_run(column: str, run: str) -> str:
    """The name of a column where several runs stand in one table."""
    return f"{column} [{run}]"


def without_run(column: str) -> str:
    """The column's own name."""
    return column.partition(" [")[0]


def run_of(column: str) -> str:
    """The run in it; empty where there is only one."""
    return column.partition(" [")[2].removesuffix("]")


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
