"""Several runs in one: beside each other, or one after the other.

Both are results themselves, with other columns or another axis, and a page can be made of them as of any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from fulmen.lab.bench.results import Results, Table, of_run, without_run

RUN = "run"  # the axis of a history
TICKS = "ticks"  # of that axis, in a table's config: a label for each run
TELLING = ("fulmen", "cpu", "device", "dtype", "memory")  # what runs may differ in


@dataclass
class Together(Results):
    """Facts of the machine are the first run's; "runs" of the environment tells where the others differ."""

    runs: Mapping[str, Results] = field(default_factory=dict)

    @property
    def warnings(self) -> list[str]:
        return [f"{label}: {warning}" for label, run in self.runs.items() for warning in run.warnings]


def side_by_side(runs: Mapping[str, Results]) -> Together:
    """Every column once for each run; speedups are over the baseline of the first run that has the table."""
    label = labels(runs)
    tables: dict[tuple[str, str], Table] = {}
    for name, run in runs.items():
        for table in run.filled:
            title = table.title.removesuffix(f"-{table.config['dtype']}")  # runs may differ in it
            _add(tables, replace(table, title=title), (title, table.section), label[name])
    return _together({label[name]: run for name, run in runs.items()}, map(_interleaved, tables.values()))


def history(runs: Iterable[Results]) -> Together:
    """Every length of each table of times, run after run: one point for each, 1 being the oldest. Where they were made
    on several machines, or with freed memory kept and returned, each has columns of its own."""
    ordered = sorted(distinct(runs), key=lambda run: run.started)
    facts = [_facts(run) for run in ordered]
    telling = ("cpu", "device", "memory") if len({fact["memory"] for fact in facts}) > 1 else ("cpu", "device")
    machines = [", ".join(fact[key] for key in telling) for fact in facts]
    ticks = {i: f"{run.started[:10]} {run.environment['fulmen']}" for i, run in enumerate(ordered, start=1)}
    tables: dict[tuple[str, str], Table] = {}
    for i, (run, machine) in enumerate(zip(ordered, machines, strict=True), start=1):
        for table in (table for table in run.filled if table.metric == "speed"):
            for n in table.lengths:
                point = replace(
                    table,
                    title=f"{table.title}-{table.axis}{n}",
                    axis=RUN,
                    config=table.config | {TICKS: ticks},
                    cells=[replace(cell, n=i) for cell in table.cells if cell.n == n],
                )
                _add(tables, point, (point.title, table.section), machine if len({*machines}) > 1 else "")
    return _together({f"run {i}": run for i, run in enumerate(ordered, start=1)}, map(_interleaved, tables.values()))


def distinct(runs: Iterable[Results]) -> list[Results]:
    """Each run once, where there are copies of its file: the fullest."""
    by_cells = sorted(runs, key=lambda run: sum(len(table.cells) for table in run.tables))
    return list({(run.started, repr(run.environment)): run for run in by_cells}.values())


def labels(runs: Mapping[str, Results]) -> dict[str, str]:
    """By the name of each run: what it differs in from others (version, CPU, device, dtype, memory), or its name."""
    facts = {name: _facts(run) for name, run in runs.items()}
    telling = [key for key in TELLING if len({fact[key] for fact in facts.values()}) > 1]
    found = {name: ", ".join(fact[key] for key in telling) for name, fact in facts.items()}
    return found if telling and len({*found.values()}) == len(found) else {name: name for name in runs}


def _add(tables: dict[tuple[str, str], Table], table: Table, key: tuple[str, str], run: str) -> None:
    """To what other runs have of it, its columns as those of ``run``."""
    names = {column: of_run(column, run) if run else column for column in table.columns}
    empty = replace(table, columns=[], cells=[], owners={}, errors={}, baseline=names.get(table.baseline, ""))
    merged = tables.setdefault(key, empty)
    merged.columns += [name for name in names.values() if name not in merged.columns]
    merged.cells += [replace(cell, column=names[cell.column]) for cell in table.cells]
    merged.owners |= {names[column]: owner for column, owner in table.owners.items()}
    merged.errors |= {names[column]: error for column, error in table.errors.items()}


def _interleaved(table: Table) -> Table:
    """The runs of a column beside each other."""
    own = list(dict.fromkeys(map(without_run, table.columns)))
    return replace(table, columns=sorted(table.columns, key=lambda column: own.index(without_run(column))))


def _together(runs: Mapping[str, Results], tables: Iterable[Table]) -> Together:
    first = next(iter(runs.values()))
    told = {name: f"{run.started[:16]}, {', '.join(filter(None, _facts(run).values()))}" for name, run in runs.items()}
    last = max((run.finished for run in runs.values() if run.finished), default=None)
    facts = (first.environment | {"runs": told}, first.options, first.started, last)
    return Together(*facts, tables=list(tables), runs=runs)


def _facts(run: Results) -> dict[str, str]:
    environment, options = run.environment, run.options
    on_cuda = options.get("device") == "cuda"
    return {
        "fulmen": f"fulmen {environment['fulmen']}",
        "cpu": environment["cpu"]["model"],
        "device": ", ".join(environment["gpus"]) if on_cuda else f"{environment['cpu']['threads']} threads",
        "dtype": str(options.get("dtype", "")),
        "memory": "" if on_cuda else f"freed memory {options.get('freed_memory', 'kept')}",
    }
