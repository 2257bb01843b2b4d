"""`fulmen report`. Beside the package that does it, which takes a second to import."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from fulmen.lab.arguments import input_file, output_folder


def add_command(commands: Any) -> None:
    report = commands.add_parser("report", help="results of `fulmen bench` as one HTML page, Markdown, CSV and plots")
    report.add_argument("results", type=input_file, metavar="RESULTS.json", help="what `fulmen bench` wrote")
    report.add_argument("--out", type=output_folder, metavar="DIR", help="where to (default: beside RESULTS.json)")
    report.add_argument(
        "--inspection",
        type=input_file,
        metavar="FILE",
        help="what `fulmen inspect --json` wrote, for the memory budget",
    )
    report.set_defaults(run=run_report)


def run_report(options: argparse.Namespace) -> None:
    from fulmen.lab.bench.report import write
    from fulmen.lab.bench.report.kernels import load_inspection
    from fulmen.lab.bench.report.plots import why_no_plots
    from fulmen.lab.bench.results import load

    inspection = load_inspection(options.inspection) if options.inspection else None
    for path in write(load(options.results), options.out or options.results.parent, inspection):
        print(path)
    if why_no_plots():
        print(f"fulmen: {why_no_plots()}", file=sys.stderr)
