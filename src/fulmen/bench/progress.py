"""A bar that says what runs now; where nobody watches, lines for programs, or nothing."""

from __future__ import annotations

import json
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Steps:
    """Progress over a known number of steps, on the error output of a terminal."""

    def __init__(self, total: int) -> None:
        columns = (BarColumn(), TextColumn("{task.completed}/{task.total} {task.description}"), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self._task = self._bar.add_task("", total=total)
        self._begun = False
        self._bar.start()

    def begin(self, what: str) -> None:
        """The step before is done; ``what`` runs now."""
        self._bar.update(self._task, description=what, advance=1 if self._begun else 0)
        self._begun = True

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class Live:
    """Progress of a benchmark run: suite, column and length, time elapsed and left.

    Where the error output is no terminal it gets one line of JSON for each length that is done.
    """

    def __init__(self, total: float) -> None:
        left = TimeRemainingColumn(compact=True)
        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TextColumn("left:"), left)
        self._watched = sys.stderr.isatty()
        console = Console(stderr=True)
        self._bar = Progress(*columns, console=console, transient=True, disable=not self._watched, refresh_per_second=2)
        self._task = self._bar.add_task("", total=total)
        self._start, self._total, self._done = time.perf_counter(), total, 0.0
        self._where: tuple[str, int] = ("", 0)

    def show(self, suite: str, column: str, n: int) -> None:
        self._where = suite, n
        self._bar.update(self._task, description=f"{suite} {column} n = {n}")

    def advance(self, work: float) -> None:
        self._done += work
        self._bar.advance(self._task, work)
        if not self._watched:
            (suite, n), elapsed = self._where, time.perf_counter() - self._start
            left = elapsed / self._done * (self._total - self._done)
            line = {"suite": suite, "n": n, "elapsed": round(elapsed, 1), "left": round(left, 1)}
            print(json.dumps(line), file=sys.stderr, flush=True)

    def __enter__(self) -> Live:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
