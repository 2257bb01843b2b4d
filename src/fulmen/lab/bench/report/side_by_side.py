"""Several runs in one: beside each other, or one after the other.

Both are results themselves, with other columns or another axis, and a page can be made of them as of any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fulmen.lab.bench.results import Results, Table, of_run, without_run

RUN = "run"  # the axis of a history


def labels(runs: Mapping[str, Results]) -> dict[str, str]:
    """By the name of each run: what it differs in from the others (version, CPU, device, dtype), or its name."""
    facts = {name: _facts(run) for name, run in runs.items()}
    telling = [key for key in ("fulmen", "cpu", "device", "dtype") if len({fact[key] for fact in facts.values()}) > 1]
    found = {name: ", ".join(fact[key] for key in telling) for name, fact in facts.items()}
    return found if telling and len({*found.values()}) == len(found) else {name: name for name in runs}


def side_by_side(runs: Mapping[str, Results]) -> Results:
    """Every column once for each run; speedups are over the baseline of the first run that has the table."""
    label = labels(runs)
    tables: dict[tuple[str, str], Table] = {}
    for name, run in runs.items():
        for table in run.filled:
            title = table.title.removesuffix(f"-{table.config['dtype']}")  # runs may differ in it
            columns = {column: of_run(column, label[name]) for column in table.columns}
            merged = tables.setdefault(
                (title, table.section),
                replace(table, title=title, columns=[], cells=[], baseline=columns.get(table.baseline, "")),
            )
            merged.columns += columns.values()
            merged.cells += [replace(cell, column=columns[cell.column]) for cell in table.cells]
    return _made_of(runs, [_interleaved(table) for table in tables.values()])


def history(runs: Sequence[Results]) -> Results:
    """The longest length of each table that has times, run after run: one point for each, 1 being the oldest."""
    ordered = sorted(runs, key=lambda run: run.started)
    tables: dict[tuple[str, str], Table] = {}
    for number, run in enumerate(ordered, start=1):
        for table in run.filled:
            if table.metric != "speed":
                continue
            key = table.title, table.section
            merged = tables.setdefault(key, replace(table, axis=RUN, columns=[], cells=[]))
            merged.columns += [column for column in table.columns if column not in merged.columns]
            merged.cells += [replace(cell, n=number) for cell in table.cells if cell.n == table.lengths[-1]]
    return _made_of({f"run {number}": run for number, run in enumerate(ordered, start=1)}, list(tables.values()))


def _interleaved(table: Table) -> Table:
    """The runs of a column beside each other."""
    own = list(dict.fromkeys(map(without_run, table.columns)))
    return replace(table, columns=sorted(table.columns, key=lambda column: own.index(without_run(column))))


def _made_of(runs: Mapping[str, Results], tables: list[Table]) -> Results:
    """Facts of the machine are the first run's; "runs" tells where the others differ."""
    first = next(iter(runs.values()))
    told = {name: f"{run.started[:16]}, {', '.join(filter(None, _facts(run).values()))}" for name, run in runs.items()}
    last = max((run.finished for run in runs.values() if run.finished), default=None)
    return Results(first.environment | {"runs": told}, first.options, first.started, last, tables)


def _facts(run: Results) -> dict[str, str]:
    environment, options = run.environment, run.options
    return {
        "fulmen": f"fulmen {environment['fulmen']}",
        "cpu": environment["cpu"]["model"],
        "device": ", ".join(environment["gpus"]) if options.get("device") == "cuda" else "cpu",
        "dtype": str(options.get("dtype", "")),
    }
