"""What a run says in one table, and what it left out."""

from __future__ import annotations

from collections import Counter

from fulmen.lab.bench.report.findings import duel
from fulmen.lab.bench.report.groups import groups_of
from fulmen.lab.bench.results import OVER_BUDGET, Results

PHASES = {"forward": ("fwd",), "training": ("fwd", "bwd")}


def summary(results: Results) -> str:
    """Ours against the best that is not ours, for every suite and section; empty if there is no such pair."""
    rows, versions = [], results.environment.get("peers", {})
    for group in groups_of(results.filled):
        for phase, modes in PHASES.items():
            found = duel(group, modes, versions)
            if found is not None:
                where = f"{group.suite} {group.section}".strip()
                times = (
                    f"{_time(found.ours_time)} ({found.ours.name})",
                    f"{_time(found.other_time)} ({found.other.name})",
                )
                rows.append((where, phase, str(found.n), *times, f"{found.ratio:.2f}x", found.owner))
    if not rows:
        return ""
    head = ("what", "phase", "n", "ours", "the best other", "ratio", "whose that is")
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
    return "Ours against the best that is not ours, at the longest length that both ran:\n" + "\n".join(text)


def left_out(results: Results) -> str:
    """How many cells of each suite the time budget left out; empty if none."""
    cells = ((table.suite, cell) for table in results.filled for cell in table.cells)
    counts = Counter(suite for suite, cell in cells if (cell.skipped or "").startswith(OVER_BUDGET))
    if not counts:
        return ""
    each = ", ".join(f"{number} of {suite}" for suite, number in counts.items())
    return f"Left out for time: {each} cells. --budget gives more, and `fulmen bench SUITE` all of it to one suite."


def _time(milliseconds: float) -> str:
    return f"{milliseconds:.3g} ms"
