"""Progress of a benchmark run: suite, column and length."""

from __future__ import annotations

from fulmen.lab.progress import Line


class Live:
    """What is measured now; programs get a line for each length that is done."""

    def __init__(self, total: float, progress: str = "auto", limit: float = float("inf")) -> None:
        self._line = Line(total, progress, limit)
        self._suite, self._n = "", 0

    def show(self, suite: str, column: str, n: int) -> None:
        self._suite, self._n = suite, n
        self._line.show(f"{suite} {column} n = {n}")

    def advance(self, work: float) -> None:
        self._line.advance(work, suite=self._suite, n=self._n)

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.clear()
