"""`fulmen report`: a run's results as CSV, Markdown, plots and one HTML page."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from fulmen.lab.bench import suites
from fulmen.lab.bench.report.groups import groups_of
from fulmen.lab.bench.report.kernels import KernelReport
from fulmen.lab.bench.report.markdown_report import markdown_report
from fulmen.lab.bench.report.page import page
from fulmen.lab.bench.report.plots import drawn_plots, why_no_plots
from fulmen.lab.bench.results import Results
from fulmen.lab.bench.tables import to_csv
from fulmen.lab.files import write_bytes


def write(results: Results, folder: Path, inspection: list[KernelReport] | None = None) -> list[Path]:
    """Fill ``folder``, which is made if need be; returns the files. None is written unless all could be made. Plots are
    only drawn where matplotlib is installed.

    Args:
        inspection: what `fulmen inspect --json` wrote, for the sections on shared memory.
    """
    texts = {"results.csv": to_csv(results.filled), "report.html": page(results)}
    groups = groups_of(results.filled)
    for name, those in groupby(groups, key=lambda group: group.suite):
        texts[f"{name}.md"] = markdown_report(suites.find(name), list(those), results, inspection)
    made = {name: text.encode() for name, text in texts.items()} | ({} if why_no_plots() else drawn_plots(groups))
    for name, content in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / name, content)
    return [folder / name for name in made]
