"""The published reports' figures, as printed, with their source and GPU.

One JSON file for each report. Numbers are kept as the text that was printed, so that nothing of them is lost.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from fulmen.lab.bench.results import Table

REPORTS = ("state", "lasd", "la3", "tpa_decode", "flao")
_TITLE = re.compile(r"(?P<report>\w+)-(?P<metric>\w+)-(?P<mode>fwd|bwd|both)-(?P<sizes>[\w-]+)-(?P<dtype>\w+)")
_SIZE_NAMES = {"batch": "batch", "head": "heads", "dim": "dim", "rank": "rank"}


@dataclass(frozen=True)
class PublishedTable:
    """One table of a report, by length. ``(title, section)`` is unique."""

    report: str  # the suite that reproduces it
    source: str
    gpu: str
    heading: str  # above the table in the report
    section: str  # where titles repeat; empty otherwise
    title: str
    metric: str  # "speed" (milliseconds), "memory" (MiB) or "speedup"
    mode: str  # "fwd", "bwd", or "both" for their sum
    axis: str  # "n" or "m"
    columns: list[str]
    rows: list[tuple[int, dict[str, float]]]
    config: dict[str, Any]  # batch, heads, dim, dtype ...


@cache
def tables() -> tuple[PublishedTable, ...]:
    """Every table of the five reports that has a length on one of its axes, in the reports' order."""
    return tuple(table for report in REPORTS for table in _tables_of(document(report)))


def find(title: str, section: str = "") -> PublishedTable | None:
    return next((table for table in tables() if (table.title, table.section) == (title, section)), None)


def closest(table: Table) -> PublishedTable | None:
    """The published table of the same figures, at the same sizes if there is one, else the nearest batch × heads."""

    def work(config: dict[str, Any]) -> float:
        return math.log(config.get("batch", 1) * config.get("heads", 1))

    # la3 gives one peak for forward and backward together, which is that of the backward.
    modes = ("bwd", "both") if (table.metric, table.mode) == ("memory", "bwd") else (table.mode,)
    alike = (table.suite, table.metric, table.section)
    found = [one for one in tables() if (one.report, one.metric, one.section) == alike and one.mode in modes]
    return min(found, key=lambda one: abs(work(one.config) - work(table.config)), default=None)


def document(report: str) -> dict[str, Any]:
    """A report's data file: the tables' texts, cell by cell."""
    return json.loads(files(__name__).joinpath(f"{report}.json").read_text("utf-8"))


def configuration(title: str) -> dict[str, Any]:
    """``"lasd-speed-fwd-batch4-head32-dim128-bf16"`` as report, metric, mode, batch, heads, dim and dtype."""
    parts = _TITLE.fullmatch(title)
    if parts is None:
        raise ValueError(f"{title!r} is not the title of a table")
    # The second dim of flao is that of v.
    sizes = {_SIZE_NAMES[name]: int(size) for name, size in re.findall(r"([a-z]+)(\d+)", parts["sizes"])}
    return {key: parts[key] for key in ("report", "metric", "mode")} | sizes | {"dtype": parts["dtype"]}


def _tables_of(content: dict[str, Any]) -> Iterator[PublishedTable]:
    if content["report"] == "la3":
        yield from _la3_tables(content)
        return
    for table in content["tables"]:
        rows = [
            (int(float(n)), dict(zip(table["columns"], map(float, figures), strict=True)))
            for n, *figures in table["rows"]
        ]
        yield _table(content, table["heading"], table["section"], table["title"], table["axis"], rows)


def _la3_tables(content: dict[str, Any]) -> Iterator[PublishedTable]:
    """The la3 report has Markdown tables, a kernel in each row, and no titles. Here they are like the others."""
    printed = {table["heading"]: table for table in content["tables"]}

    def by_length(heading: str, what: str, cells: list[tuple[str, str, str]], section: str = "") -> PublishedTable:
        rows: dict[int, dict[str, float]] = {}
        for n, kernel, figure in cells:
            rows.setdefault(int(n.removeprefix("N=")), {})[kernel.strip("*")] = _number(figure)
        return _table(content, heading, section, f"la3-{what}-batch4-head32-dim64-bf16", "n", sorted(rows.items()))

    for heading, what in (("Summary", "speed-both"), ("Speedup vs SDPA", "speedup-both")):
        lengths = printed[heading]["columns"][1:]
        rows = printed[heading]["rows"]
        cells = [(n, kernel, figure) for kernel, *figures in rows for n, figure in zip(lengths, figures, strict=True)]
        yield by_length(heading, what, cells, section="Summary")
    detailed = printed["Detailed Results"]["rows"]
    for position, what in enumerate(("speed-fwd", "speed-bwd", "speed-both", "speedup-both"), start=2):
        yield by_length("Detailed Results", what, [(row[1], row[0], row[position]) for row in detailed])
    memory = printed["Memory Efficiency"]["rows"]
    cells = [(n, "LA3-Chunked", chunked) for n, chunked, *_ in memory]
    cells += [(n, "PyTorch-SDPA", sdpa) for n, _, sdpa, _ in memory]
    yield by_length("Memory Efficiency", "memory-both", cells)


def _table(
    content: dict[str, Any],
    heading: str,
    section: str,
    title: str,
    axis: str,
    rows: list[tuple[int, dict[str, float]]],
) -> PublishedTable:
    config = configuration(title)
    report, metric, mode = config.pop("report"), config.pop("metric"), config.pop("mode")
    source, gpu, columns = content["source"], content["gpu"], list(rows[0][1])
    return PublishedTable(report, source, gpu, heading, section, title, metric, mode, axis, columns, rows, config)


def _number(text: str) -> float:
    """``"**7.52x**"``, ``"18.10ms"`` and ``"545 MB"`` without what surrounds the number."""
    return float(text.strip("*").rstrip("xmsMB "))
