"""One HTML page with everything in it: it opens without a network, and loads nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from importlib.resources import files
from itertools import groupby
from typing import Any

from fulmen.lab.bench import published, suites
from fulmen.lab.bench.report.findings import Duel, headline, what
from fulmen.lab.bench.report.groups import Group, groups_of
from fulmen.lab.bench.report.side_by_side import RUN, TICKS
from fulmen.lab.bench.report.system import backend_lines, facts, machine
from fulmen.lab.bench.results import Cell, Results, Table
from fulmen.lab.bench.suite import Sizes
from fulmen.lab.bench.tables import NOISE, UNITS, kind_of, published_form, reason


def page(results: Results) -> str:
    parts = {
        "style": _asset("page.css"),
        "script": _asset("chart.js") + _asset("page.js"),
        "data": _as_script(page_data(results)),  # last: nothing that was measured is taken for a place to fill
    }
    text = _asset("page.html")
    for name, part in parts.items():
        text = text.replace("{{" + name + "}}", part)
    return text


def page_data(results: Results) -> dict[str, Any]:
    groups = groups_of(results.filled)
    suites = [_suite(name, list(those)) for name, those in groupby(groups, key=lambda group: group.suite)]
    return {
        "machine": machine(results),
        "warnings": results.warnings,
        "noise": NOISE,
        "facts": facts(results),
        "backends": backend_lines(results),
        "suites": suites,
        "skipped": _skipped(results),
    }


def _suite(name: str, groups: list[Group]) -> dict[str, Any]:
    kinds = {column: group.owner(column).kind for group in reversed(groups) for column in group.columns}
    ordered = dict.fromkeys(column for group in groups for column in group.columns)
    found, suite = headline(groups), suites.find(name)
    return {
        "name": name,
        "title": suite.text.title,
        "subject": suite.text.subject,
        "columns": [{"name": column, "kind": kinds[column]} for column in ordered],
        "headline": None if found is None else _headline(*found),
        "groups": [_group(group) for group in groups],
    }


def _column(group: Group, name: str) -> dict[str, str]:
    column, owner = group.column(name), group.owner(name)
    about = column.about if column else ""
    return {"title": group.title(name), "about": about, "kind": owner.kind, "owner": owner.described}


def _headline(found: Duel, among: int) -> dict[str, Any]:
    """``among`` so many its ratio is the median."""
    group = found.group
    where = [f"at {group.any_table.axis} = {found.n}, {what(group)}", group.section]
    where.append(f"the median of {among} sections and sizes" if among > 1 else "")
    return {
        "column": group.title(found.ours),
        "ratio": found.ratio,
        "noisy": found.noisy,
        "other": f"{group.title(found.other)} ({found.owner})",
        "where": "; ".join(part for part in where if part),
    }


def _group(group: Group) -> dict[str, Any]:
    return {
        "label": group.label,
        "section": group.section,
        "axis": group.any_table.axis,
        "baseline": group.baseline,
        "ticks": group.any_table.config.get(TICKS),
        "columns": {name: _column(group, name) for name in group.columns},
        "tokens": _tokens(group),
        "tables": {f"{metric}-{mode}": _table(table) for (metric, mode), table in group.tables.items()},
    }


def _table(table: Table) -> dict[str, Any]:
    cells: dict[str, dict[int, dict[str, Any]]] = {}
    for cell in table.cells:
        cells.setdefault(cell.column, {})[cell.n] = _cell(cell)
    return {
        "title": table.title,
        "unit": UNITS[table.metric],
        "columns": table.columns,
        "lengths": table.lengths,
        "errors": table.errors,
        "checked": table.checked,
        "cells": cells,
        "flops": _flops(table) if table.metric == "speed" else {},
        "text": published_form(table),
        "published": _published(table),
    }


def _tokens(group: Group) -> dict[int, int]:
    """Of one call, by length."""
    suite, batch = suites.find(group.suite), group.any_table.config["batch"]
    if group.any_table.axis == RUN:
        return {}
    return {n: batch * (1 if suite.one_token(group.section) else n) for n in group.lengths}


def _flops(table: Table) -> dict[str, dict[int, float]]:
    """The products of each column's algorithm, by length; of those that count them."""
    suite, found = suites.find(table.suite), dict[str, dict[int, float]]()
    for name in table.columns if table.axis != RUN else ():
        column = suite.column(name, table.section)
        work = {n: column.least(Sizes.of(table.config), n).get(table.mode) for n in table.lengths} if column else {}
        if all(work.values()):
            found[name] = {n: one.flops for n, one in work.items() if one}
    return found


def _cell(cell: Cell) -> dict[str, Any]:
    known = {name: value for name, value in asdict(cell).items() if name not in ("n", "column", "sittings")}
    if cell.sittings:
        known["sittings"] = len(cell.sittings)
        known["lead"] = round(cell.lead, 3) if len(cell.sittings) > 1 else None
    return {name: value for name, value in known.items() if value is not None} | ({"noisy": True} if cell.noisy else {})


def _published(table: Table) -> dict[str, Any] | None:
    found = None if table.axis == RUN else published.closest(table)
    if found is None:
        return None
    curves = {column: {n: row[column] for n, row in found.rows if column in row} for column in found.columns}
    sizes = found.title.partition(f"-{found.metric}-{found.mode}-")[2]
    return {"gpu": found.gpu, "sizes": sizes, "title": found.title, "source": found.source, "curves": curves}


def _skipped(results: Results) -> list[dict[str, str]]:
    """Every reason, and the cells it holds for. Those that differ in what follows their colon are told together."""
    alike: dict[str, dict[str, dict[tuple[str, str], set[int]]]] = {}
    for table, cell in _cells_without_value(results):
        why = reason(cell)
        places = alike.setdefault(kind_of(why), {}).setdefault(why, {})
        places.setdefault((table.suite, cell.column), set()).add(cell.n)
    found = []
    for kind, reasons in alike.items():
        together = len(reasons) > 1
        cells = [
            f"{suite} · {column} at {_list(lengths)}" + (f" ({why.removeprefix(kind).strip(': ')})" if together else "")
            for why, places in reasons.items()
            for (suite, column), lengths in places.items()
        ]
        found.append({"reason": kind if together else next(iter(reasons)), "cells": "; ".join(cells)})
    return found


def _cells_without_value(results: Results) -> Iterator[tuple[Table, Cell]]:
    for table in results.filled:
        yield from ((table, cell) for cell in table.cells if cell.value is None)


def _list(lengths: set[int]) -> str:
    return ", ".join(map(str, sorted(lengths)))


def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text("utf-8")


def _as_script(content: dict[str, Any]) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
