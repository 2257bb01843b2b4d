"""`fulmen report`: a run's results as CSV, JSON, Markdown, plots and one HTML page."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from fulmen.lab.bench import suites
from fulmen.lab.bench.report.groups import groups_of
from fulmen.lab.bench.report.kernels import KernelReport
from fulmen.lab.bench.report.markdown_report import markdown_report
from fulmen.lab.bench.report.page import page
from fulmen.lab.bench.report.plots import why_no_plots, write_plots
from fulmen.lab.bench.results import Results
from fulmen.lab.bench.tables import to_csv


def write(results: Results, folder: Path, inspection: list[KernelReport] | None = None) -> list[Path]:
    """Fill ``folder``, which is made if need be; returns the files. Plots are only drawn where matplotlib is installed.

    Args:
        inspection: what `fulmen inspect --json` wrote, for the sections on shared memory.
    """
    folder.mkdir(parents=True, exist_ok=True)
    raw = folder / "benchmark_results.json"
    results.save(raw)
    texts = {"results.csv": to_csv(results.filled), "report.html": page(results)}
    groups = groups_of(results.filled)
    for name, those in groupby(groups, key=lambda group: group.suite):
        texts[f"{name}.md"] = markdown_report(suites.find(name), list(those), results, inspection)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    plots = [] if why_no_plots() else write_plots(groups, folder / "plots")
    return [raw, *(folder / name for name in texts), *plots]
