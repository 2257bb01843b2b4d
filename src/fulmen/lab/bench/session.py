"""One `fulmen bench`: from what was requested to tables on the screen and files on disk."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import torch

from fulmen.lab.bench import report, runner, suites
from fulmen.lab.bench.cli import FOLDER, RESULTS
from fulmen.lab.bench.folder import Folder
from fulmen.lab.bench.plan import METRICS, MODES, Options, plan
from fulmen.lab.bench.report.summary import left_out, summary
from fulmen.lab.bench.results import Results, load
from fulmen.lab.bench.tables import error_line, published_form
from fulmen.lab.environment import describe


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
    )


class Run:
    """A run, alone in its folder."""

    def __init__(self, options: Options, results: Results, folder: Folder) -> None:
        self._options, self._results, self._folder = options, results, folder

    def measure(self, json_path: Path | None, progress: str, spent: float) -> None:
        """Measure, print and write. Ctrl-C stops the measuring; what there is until then is printed and written.
        ``spent`` are the seconds since the command was typed."""
        print(describe(self._results.environment), flush=True)
        try:
            runner.run(self._options, self._results, self._folder.results, progress, spent)
        except KeyboardInterrupt:
            out = "" if self._folder.path == FOLDER else f" --out {self._folder.path}"
            print(f"fulmen: stopped; to go on: fulmen bench --resume{out}", file=sys.stderr)
            raise
        finally:
            _present(self._results, self._folder, json_path)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.close()


def begun(options: Options, out: Path) -> Run:
    """A new one. Raises ValueError if another process has one in ``out``."""
    folder = Folder(out)
    _set_threads(options)
    folder.begin()
    return Run(options, runner.new_results(options), folder)


def resumed(out: Path) -> Run:
    """The one that was stopped in ``out``; ValueError if there is none."""
    if not (out / RESULTS).exists():
        raise ValueError(f"--resume: there is no run in {out}; leave out --resume, or give the run's --out")
    folder = Folder(out)
    results = load(folder.results)
    options = Options.of_json(results.options)
    _set_threads(options)
    results.finished = None
    return Run(options, results, folder)


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

        folder = Folder(out)
        folder.begin()
        _present(memory_tables(options, runner.new_results(options)), folder, json_path)
        folder.close()


def _set_threads(options: Options) -> None:
    if options.threads is not None:
        torch.set_num_threads(options.threads)


def _present(results: Results, folder: Folder, json_path: Path | None) -> None:
    """What matters first; then every table."""
    for text in (summary(results), results.conditions.warning):
        if text:
            print(f"\n{text}")
    for table in results.filled:
        heading = f"\n{table.section}\n" if table.section else "\n"
        errors = error_line(table) if table.metric == "speed" else ""
        print(f"{heading}{published_form(table)}" + (f"\n{errors}" if errors else ""))
    if text := left_out(results):
        print(f"\n{text}")
    files = report.write(results, folder.path)
    if json_path is not None:
        shutil.copyfile(folder.results, json_path)
        files.append(json_path)
    print("\n" + "\n".join(f"wrote {file}" for file in files))
