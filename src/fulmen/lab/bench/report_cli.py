"""`fulmen report`. Beside the package that does it, which takes a second to import."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from fulmen.lab.arguments import input_file, input_path, output_folder
from fulmen.lab.bench.cli import RESULTS, results_of


def add_command(commands: Any) -> None:
    report = commands.add_parser("report", help="results of `fulmen bench` as one HTML page, Markdown, CSV and plots")
    report.add_argument("results", type=input_path, metavar="RUN", help=f"the folder of a run, or its {RESULTS}")
    report.add_argument(
        "--out",
        type=output_folder,
        metavar="DIR",
        help=f"where to (default: beside {RESULTS}; of NAME.json the folder NAME-report)",
    )
    report.add_argument(
        "--inspection",
        type=input_file,
        metavar="FILE",
        help="what `fulmen inspect --json` wrote, for the memory budget",
    )
    report.set_defaults(run=run_report, parser=report)


def run_report(options: argparse.Namespace) -> None:
    from fulmen.lab.bench.folder import Folder
    from fulmen.lab.bench.report import write
    from fulmen.lab.bench.report.kernels import load_inspection
    from fulmen.lab.bench.report.plots import why_no_plots
    from fulmen.lab.bench.results import load

    inspection = load_inspection(options.inspection) if options.inspection else None
    results: Path = results_of(options.results, options.parser)
    # What was made of one run stays apart from what was made of another.
    beside = results.parent if results.name == RESULTS else results.with_name(f"{results.stem}-report")
    loaded = load(results)
    with Folder(options.out or beside) as folder:
        for path in write(loaded, folder.path, inspection):
            print(path)
    if why_no_plots():
        print(f"fulmen: {why_no_plots()}", file=sys.stderr)
