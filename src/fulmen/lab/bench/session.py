"""One `fulmen bench`: from what was requested to tables on the screen and files on disk."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from fulmen.lab.bench import report, runner, suites
from fulmen.lab.bench.cli import FOLDER, RESULTS
from fulmen.lab.bench.conditions import Watch
from fulmen.lab.bench.folder import Folder
from fulmen.lab.bench.plan import METRICS, MODES, Options, plan
from fulmen.lab.bench.report.summary import left_out, summary
from fulmen.lab.bench.report.system import flat
from fulmen.lab.bench.results import OVER_BUDGET, Results, load
from fulmen.lab.bench.tables import error_line, published_form
from fulmen.lab.environment import describe, environment


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def options_of(asked: argparse.Namespace) -> Options:
    """Raises ValueError where options do not fit together."""
    device = asked.device or default_device()
    if device == "cuda" and not torch.cuda.is_available() and not asked.dry_run:
        raise ValueError("--device cuda: torch finds no CUDA device; with --dry-run the memory tables need none")
    return Options(
        suites=tuple(dict.fromkeys(asked.suites)) or suites.names(),
        device=device,
        dtype=asked.dtype or ("bf16" if device == "cuda" else "fp32"),
        modes=MODES if asked.mode == "both" else (asked.mode,),
        metrics=METRICS if asked.metric == "both" else (asked.metric,),
        preset=asked.preset,
        batch=asked.batch,
        heads=asked.heads,
        dim=asked.dim,
        rank=asked.rank,
        lengths=asked.lengths,
        columns=asked.columns,
        sections=asked.sections,
        budget=asked.budget,
        threads=asked.threads,
        freed_memory=asked.freed_memory,
    )


class Run:
    """A run, alone in its folder."""

    def __init__(self, options: Options, results: Results, folder: Folder) -> None:
        self.results = results
        self._options, self._folder = options, folder

    def measure(self, json_path: Path | None, progress: str, spent: float) -> None:
        """Measure, print and write. Ctrl-C stops the measuring; what there is until then is printed and written.
        ``spent`` are the seconds since the command was typed."""
        watch = Watch()
        for text in (describe(self.results.environment), watch.conditions().warning):
            if text:
                print(text, flush=True)
        try:
            try:
                runner.run(self._options, self.results, self._folder.results, progress, spent, watch)
            finally:
                _present(self.results, self._folder, json_path)
        except KeyboardInterrupt:
            out = "" if self._folder.path == FOLDER else f" --out {shlex.quote(str(self._folder.path))}"
            print(f"fulmen: stopped; to go on: fulmen bench --resume{out}", file=sys.stderr)
            raise

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.close()


def begun(options: Options, out: Path) -> Run:
    """A new one. Raises ValueError if another process has one in ``out``."""
    folder = Folder(out)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    folder.begin()
    return Run(options, runner.new_results(options), folder)


def resumed(out: Path) -> Run:
    """The one that was stopped in ``out``; ValueError if there is none."""
    if not (out / RESULTS).exists():
        raise ValueError(f"--resume: there is no run in {out}; leave out --resume, or give the run's --out")
    folder = Folder(out)
    results = load(folder.results)
    options = Options.of_json(results.options)
    torch.set_num_threads(results.environment["cpu"]["threads"])
    if changed := _changed(results.environment, environment()):
        folder.close()
        raise ValueError(f"--resume: the run was begun with {changed}; one run is of one machine: begin another")
    results.finished = None
    for table in results.tables:  # what there was no time for is tried again
        table.cells = [cell for cell in table.cells if not (cell.skipped or "").startswith(OVER_BUDGET)]
    return Run(options, results, folder)


def _changed(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What a machine, or what is installed on it, differs in from one before; empty if in nothing that is measured."""
    telling = ("fulmen", "torch", "peers", "cpu", "gpus")
    then, here = (dict(flat({name: facts.get(name) for name in telling})) for facts in (before, now))
    names = (name for name in {**then, **here} if then.get(name) != here.get(name))
    return ", ".join(f"{name} {then.get(name, 'missing')} (now {here.get(name, 'missing')})" for name in names)


def rehearse(options: Options, out: Path, json_path: Path | None) -> None:
    """Print the plan and, for a GPU, what memory it would take."""
    for part in plan(options):
        section = f" ({part.section})" if part.section else ""
        for table in part.tables(options.dtype, options.device):
            print(f"{table.title}{section}: {table.axis} = {', '.join(map(str, part.lengths))}")
        for column in part.columns:
            reason = column.why_missing(options.device)
            print(f"  {column.name:<14}{f'not here: {reason}' if reason else 'runs'}")
    if options.device == "cuda" and "memory" in options.metrics:
        from fulmen.lab.bench.dry_run import memory_tables

        with Folder(out) as folder:
            folder.begin()
            results = memory_tables(options, runner.new_results(options))
            results.save(folder.results)
            _present(results, folder, json_path)


def _present(results: Results, folder: Folder, json_path: Path | None) -> None:
    """What matters first; then every table."""
    for text in (*results.warnings, summary(results)):
        if text:
            print(f"\n{text}")
    for table in results.filled:
        heading = f"\n{table.section}\n" if table.section else "\n"
        errors = error_line(table) if table.metric == "speed" else ""
        print(f"{heading}{published_form(table)}" + (f"\n{errors}" if errors else ""))
    if text := left_out(results):
        print(f"\n{text}")
    files = [folder.results, *report.write(results, folder.path)]
    if json_path is not None:
        results.save(json_path)
        files.append(json_path)
    print("\n" + "\n".join(f"wrote {file}" for file in files))
