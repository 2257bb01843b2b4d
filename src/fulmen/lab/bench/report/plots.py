"""PNG plots: for each suite and size the time, and the speedup over the baseline, by length."""

from __future__ import annotations

import re
from importlib.util import find_spec
from io import BytesIO
from itertools import cycle
from math import ceil
from typing import Any

from fulmen.lab.bench.report.findings import named, what
from fulmen.lab.bench.report.groups import Group
from fulmen.lab.bench.tables import NOISE

# Ours are blue; what is not is warm.
OURS = ("#2563d9", "#0787a3", "#5b4bd6", "#3f9fe8", "#12307a")
OTHERS = ("#d9541e", "#b98500", "#cf2a68", "#7c4a2d", "#a43bb5", "#7d7f2b")
INK, GRID = "#1c1e26", "#e4e2da"
COLUMNS = 2  # of the legend


def why_no_plots() -> str:
    """Empty if they can be drawn."""
    return "" if find_spec("matplotlib") else "plots are left out: matplotlib is missing (pip install 'fulmen[bench]')"


def drawn_plots(groups: list[Group]) -> dict[str, bytes]:
    """A PNG by the name of its file, for each group that has at least one curve."""
    drawable = [group for group in groups if any(_curve(group, column) for column in group.columns)]
    return {f"plots/{_file_name(group)}.png": _plot(group) for group in drawable}


def _plot(group: Group) -> bytes:
    # Not pyplot: it keeps figures and may look for a display.
    from matplotlib.figure import Figure

    # By hand: what matplotlib measures to lay out a figure takes longer than drawing it.
    lines = ceil(len(group.columns) / COLUMNS)
    height = 3.9 + 0.16 * lines
    figure = Figure(figsize=(10, height), dpi=120)
    margins = {"left": 0.07, "right": 0.985, "top": 1 - 0.6 / height, "bottom": (0.75 + 0.16 * lines) / height}
    margins["wspace"] = 0.16
    time, ratio = figure.subplots(1, 2, gridspec_kw=margins)
    styles = _styles(group)
    for column in group.columns:
        style, points = styles[column], _curve(group, column)
        if points:
            label = f"{named(group, column)}, {group.owner(column).described}"
            time.plot(*zip(*points, strict=True), label=label, **style)
            time.fill_between(*_band(group, column), color=style["color"], alpha=0.16, linewidth=0)
            _mark(time, [point for point in points if group.noisy(point[0], column)], style["color"])
        ratios = [(n, speedup) for n in group.lengths if (speedup := group.speedup(n, column)) is not None]
        if ratios:
            ratio.plot(*zip(*ratios, strict=True), **style)
            unsure = [point for point in ratios if group.noisy_speedup(point[0], column)]
            _mark(ratio, unsure, style["color"])
    _label(time, group, f"ms, {what(group)}")
    _label(ratio, group, f"speedup over {group.baseline}")
    figure.suptitle(f"{group.suite}: {group.label}", fontsize=11, color=INK)
    if any(group.noisy(n, column) for n in group.lengths for column in group.columns):
        figure.text(0.985, 0.005, f"hollow: {NOISE}", ha="right", fontsize=7, color=INK)
    above = (0.5, 0.12 / height)  # the note
    columns = min(COLUMNS, len(group.columns))
    figure.legend(loc="lower center", bbox_to_anchor=above, ncols=columns, frameon=False, fontsize=7.5)
    drawn = BytesIO()
    figure.savefig(drawn)
    return drawn.getvalue()


def _mark(axes: Any, points: list[tuple[int, float]], color: str) -> None:
    """As noisy: hollow."""
    for n, value in points:
        axes.plot(n, value, marker="o", markersize=5, markerfacecolor="white", markeredgecolor=color, zorder=4)


def _label(axes: Any, group: Group, title: str) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(group.lengths, [str(n) for n in group.lengths])
    axes.set_xlabel(group.any_table.axis, color=INK)
    axes.set_title(title, fontsize=10, loc="left", color=INK)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.grid(color=GRID, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def _styles(group: Group) -> dict[str, dict[str, Any]]:
    """A colour of its family for each column; the baseline is black and thick, unless it is ours."""
    shades = {True: cycle(OURS), False: cycle(OTHERS)}
    styles: dict[str, dict[str, Any]] = {}
    for column in group.columns:
        ours = group.owner(column).kind == "ours"
        base = column == group.baseline and not ours
        styles[column] = {"color": INK, "linewidth": 2.4} if base else {"color": next(shades[ours])}
        styles[column] |= {"marker": "o", "markersize": 3.5}
    return styles


def _band(group: Group, column: str) -> tuple[list[int], list[float], list[float]]:
    """Lengths, and p20 and p80 of the total."""
    lengths, low, high = [], [], []
    for n, _ in _curve(group, column):
        cells = [group.cell("speed", mode, n, column) for mode in group.modes]
        lengths.append(n)
        low.append(sum(cell.p20 or cell.value or 0.0 for cell in cells if cell))
        high.append(sum(cell.p80 or cell.value or 0.0 for cell in cells if cell))
    return lengths, low, high


def _curve(group: Group, column: str) -> list[tuple[int, float]]:
    return [(n, time) for n in group.lengths if (time := group.total(n, column)) is not None]


def _file_name(group: Group) -> str:
    section = re.sub(r"\W+", "-", group.section)
    return "-".join(part for part in (group.suite, section, group.sizes) if part)
