"""The published reports' figures, as printed, with their source and GPU.

A suite's data file has them. Numbers are kept there as the text that was printed, so that nothing of them is lost.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from fulmen.lab.bench import suites
from fulmen.lab.bench.results import Table

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


def tables() -> list[PublishedTable]:
    """Every table of the reports that has a length on one of its axes, in the reports' order."""
    return [table for name in suites.reports() for table in tables_of(name)]


@cache
def tables_of(report: str) -> tuple[PublishedTable, ...]:
    content = suites.document(report)
    titled = suites.find(report).by_length(content["tables"])
    return tuple(_table(content["source"], content["gpu"], **table) for table in titled)


def find(title: str, section: str = "") -> PublishedTable | None:
    return next((table for table in tables() if (table.title, table.section) == (title, section)), None)


def closest(table: Table) -> PublishedTable | None:
    """The published table of the same figures, at the same sizes if there is one, else the nearest batch × heads."""

    def work(config: dict[str, Any]) -> float:
        return math.log(config.get("batch", 1) * config.get("heads", 1))

    # One peak for forward and backward together is that of the backward.
    modes = ("bwd", "both") if (table.metric, table.mode) == ("memory", "bwd") else (table.mode,)
    alike = (table.suite, table.metric, table.section)
    found = [one for one in tables() if (one.report, one.metric, one.section) == alike and one.mode in modes]
    return min(found, key=lambda one: abs(work(one.config) - work(table.config)), default=None)


def configuration(title: str) -> dict[str, Any]:
    """``"lasd-speed-fwd-batch4-head32-dim128-bf16"`` as report, metric, mode, batch, heads, dim and dtype."""
    parts = _TITLE.fullmatch(title)
    if parts is None:
        raise ValueError(f"{title!r} is not the title of a table")
    # The second dim of flao is that of v.
    sizes = {_SIZE_NAMES[name]: int(size) for name, size in re.findall(r"([a-z]+)(\d+)", parts["sizes"])}
    return {key: parts[key] for key in ("report", "metric", "mode")} | sizes | {"dtype": parts["dtype"]}


def _table(
    source: str,
    gpu: str,
    *,
    heading: str,
    section: str,
    title: str,
    axis: str,
    columns: list[str],
    rows: list[list[str]],
) -> PublishedTable:
    config = configuration(title)
    report, metric, mode = config.pop("report"), config.pop("metric"), config.pop("mode")
    by_length = [(int(float(n)), dict(zip(columns, map(float, figures), strict=True))) for n, *figures in rows]
    return PublishedTable(report, source, gpu, heading, section, title, metric, mode, axis, columns, by_length, config)
