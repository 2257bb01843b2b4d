"""What a benchmark run found: cells in tables, kept in one JSON file that is rewritten after every cell."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1


@dataclass
class Cell:
    """One column at one length. Either ``value`` or ``skipped`` says what became of it."""

    n: int  # the length: n or m
    column: str
    value: float | None = None  # milliseconds (median) or MiB
    p20: float | None = None
    p80: float | None = None
    error: float | None = None  # against the float64 reference, relative to its largest value
    first_call: float | None = None  # milliseconds of the first call ever, compilation included
    inputs: float | None = None  # MiB, in memory tables
    outputs: float | None = None
    workspace: float | None = None
    skipped: str | None = None  # why there is no value, in words


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

    @property
    def filled(self) -> list[Table]:
        """The tables that have cells; a run that was stopped may have begun others."""
        return [table for table in self.tables if table.cells]

    def save(self, path: Path) -> None:
        """Replaces the file in one step, so that a reader, or whoever comes after a crash, finds it whole."""
        text = json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n"
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text)
        os.replace(partial, path)


def load(path: Path) -> Results:
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
        if content.pop("format", None) != FORMAT:
            raise ValueError("its format is of another version")
        tables = [Table(**table | {"cells": [Cell(**cell) for cell in table["cells"]]}) for table in content["tables"]]
        return Results(**content | {"tables": tables})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a result file of `fulmen bench`: {error}") from error
