"""Running a plan: cells are checked, timed in turns, weighed, and written down as they come."""

from __future__ import annotations

import time
from pathlib import Path

from fulmen.lab.bench.conditions import Watch
from fulmen.lab.bench.correctness import CorrectnessCheck
from fulmen.lab.bench.length import Bench, Length, seconds_again
from fulmen.lab.bench.measure import keep_freed_memory, seconds_of, seconds_on_cuda
from fulmen.lab.bench.plan import Budget, Options, plan
from fulmen.lab.bench.progress import Live
from fulmen.lab.bench.results import Results, Table, now
from fulmen.lab.bench.spending import Spending
from fulmen.lab.bench.suite import DTYPES
from fulmen.lab.environment import environment

A_MOMENT = 1.0  # seconds: what a run that is killed may lose, beside the length that it is at


def run(
    options: Options,
    results: Results,
    path: Path,
    progress: str = "auto",
    spent: float = 0.0,
    watch: Watch | None = None,
) -> None:
    """Fill ``results`` and save them to ``path`` whenever there are new cells. Ctrl-C leaves all that was measured.
    ``spent`` are the seconds of the budget that are gone already; ``watch`` sees what else the machine does."""
    parts, pace, watch = plan(options), options.pace, watch or Watch()
    spending, conditions = Spending(results.seconds), results.conditions
    budget = Budget(pace.budget, parts, spent)
    total = pace.sittings * sum(Budget.work(part, n) for part in parts for n in part.lengths)
    saved = 0.0

    def save(every: float = 0.0) -> None:
        nonlocal saved
        if time.perf_counter() < saved + every:
            return
        with spending.on("saving"):
            results.seconds, results.conditions = spending.as_json(), conditions.worst(watch.conditions())
            results.save(path)
        saved = time.perf_counter()

    save()
    if options.freed_memory == "kept":
        keep_freed_memory()
    try:
        with Live(total, progress, budget.left) as live:
            dtype, on_cuda = DTYPES[options.dtype], options.device == "cuda"
            clock = seconds_on_cuda if on_cuda else seconds_of
            check = CorrectnessCheck(dtype, options.device)
            bench = Bench(options.device, dtype, pace, check, clock, live, spending, budget)
            begun = [
                (part, {(t.mode, t.metric): _begun(results, t) for t in part.tables(options.dtype, options.device)})
                for part in parts
            ]
            for sitting in range(pace.sittings):
                if sitting:
                    known = [seconds_again(tables, n, pace) for part, tables in begun for n in part.lengths]
                    if not any(known):
                        break
                    budget.go_on(pace.sittings - sitting, known)
                for part, tables in begun:
                    for n in part.lengths:
                        length = Length(bench, part, tables, n, sitting, budget.take())
                        for mode in part.modes:
                            length.measure(mode)
                            save(every=A_MOMENT)
                        length.close()
                        live.advance(Budget.work(part, n))
        results.finished = now()
    finally:
        save()


def new_results(options: Options) -> Results:
    return Results(environment=environment(), options=options.as_json(), started=now())


def _begun(results: Results, table: Table) -> Table:
    """The table as an earlier run has left it, or this new one."""
    for begun in results.tables:
        if (begun.title, begun.section) == (table.title, table.section):
            return begun
    results.tables.append(table)
    return table
