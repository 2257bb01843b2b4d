"""What a run says in one table, and what it left out."""

from __future__ import annotations

from collections import Counter

from fulmen.lab.bench.report.findings import duel
from fulmen.lab.bench.report.groups import groups_of
from fulmen.lab.bench.results import OVER_BUDGET, Results
from fulmen.lab.bench.tables import MARK, NOISE

PHASES = {"forward": ("fwd",), "training": ("fwd", "bwd")}


def summary(results: Results) -> str:
    """Ours against the best that is not ours, for every suite and section; empty if there is no such pair."""
    rows, noisy = [], False
    for group in groups_of(results.filled):
        for phase, modes in PHASES.items():
            found = duel(group, modes)
            if found is not None and group.owner(found.other).kind != "ours":
                where = f"{group.suite} {group.section}".strip()
                times = (f"{found.told(column)} ({column})" for column in (found.ours, found.other))
                mark = MARK if found.noisy else ""
                row = (where, _phase(group.section, phase), str(found.n), *times, f"{found.ratio:.2f}x{mark}")
                rows.append((*row, found.owner))
                noisy |= found.noisy
    if not rows:
        return ""
    head = ("what", "phase", "n", "ours", "the best other", "ratio", "whose that is")
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    text += [f"{MARK} {NOISE}"] if noisy else []
    about = "Ours against the best that is not ours, at the longest length that both ran:"
    return "\n".join([about, *text])


def _phase(section: str, phase: str) -> str:
    """Some sections are a phase of their own."""
    words = section.replace(",", "").split()
    return next((word for word in ("training", "prefill", "decode") if word in words), phase)


def left_out(results: Results) -> str:
    """How many cells of each suite the time budget left out; empty if none."""
    cells = ((table.suite, cell) for table in results.filled for cell in table.cells)
    counts = Counter(suite for suite, cell in cells if (cell.skipped or "").startswith(OVER_BUDGET))
    if not counts:
        return ""
    each = ", ".join(f"{number} of {suite}" for suite, number in counts.items())
    return f"Left out for time: {each} cells. --budget gives more, and `fulmen bench SUITE` all of it to one suite."
