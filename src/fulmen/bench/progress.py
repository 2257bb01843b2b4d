"""A bar that says what runs now; silent where nobody watches."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


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
