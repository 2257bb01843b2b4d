"""One `fulmen bench`: from what was requested to tables on the screen and files on disk."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import torch

from fulmen.lab.bench import report, runner, suites
from fulmen.lab.bench.cli import RESULTS
from fulmen.lab.bench.plan import METRICS, MODES, Options, plan
from fulmen.lab.bench.results import Results
from fulmen.lab.bench.tables import error_form, published_form
from fulmen.lab.environment import describe


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def options_of(asked: argparse.Namespace) -> Options:
    """Raises ValueError where options do not fit together."""
    device = asked.device or default_device()
    if device == "cuda" and not torch.cuda.is_available() and not asked.dry_run:
        raise ValueError("--device cuda: torch finds no CUDA device; with --dry-run the memory tables need none")
    if asked.resume and asked.dry_run:
        raise ValueError("--resume goes on with measuring, and a --dry-run measures nothing")
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


def begin(options: Options, out: Path, resume: bool) -> Results:
    """Results to be filled: new ones, or with ``resume`` those in ``out``; ValueError if there are none, or if they
    have other options."""
    path = out / RESULTS
    if resume and not path.exists():
        raise ValueError(f"--resume: there is no {path} to go on with; leave out --resume, or give the run's --out")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if resume:
        return runner.resumed(options, path)
    out.mkdir(parents=True, exist_ok=True)
    _keep_previous(path)
    return runner.new_results(options)


def run(options: Options, results: Results, out: Path, json_path: Path | None) -> None:
    """Measure, print and write. Ctrl-C stops the measuring; what there is until then is printed and written."""
    print(describe(results.environment), flush=True)
    try:
        runner.run(options, results, out / RESULTS)
    finally:
        _present(results, out, json_path)


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

        _present(memory_tables(options, begin(options, out, resume=False)), out, json_path)


def _keep_previous(path: Path) -> None:
    """Results of an earlier run are not lost, and can be compared with."""
    if path.exists():
        os.replace(path, path.with_suffix(".previous.json"))


def _present(results: Results, out: Path, json_path: Path | None) -> None:
    for table in results.filled:
        heading = f"\n{table.section}\n" if table.section else "\n"
        errors = error_form(table) if table.metric == "speed" else ""
        print(f"{heading}{published_form(table)}" + (f"\n{errors}" if errors else ""))
    files = report.write(results, out)
    if json_path is not None:
        shutil.copyfile(out / RESULTS, json_path)
        files.append(json_path)
    print("\n" + "\n".join(f"wrote {file}" for file in files))
