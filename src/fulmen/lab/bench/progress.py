"""Progress of a benchmark run: a bar that says what runs now; where nobody watches, lines for programs."""

from __future__ import annotations

import json
import sys

from fulmen.lab.progress import Line


class Live:
    """Suite, column and length, time elapsed and left.

    Where the error output is no terminal it gets one line of JSON for each length that is done.
    """

    def __init__(self, total: float) -> None:
        self._line = Line(total)
        self._suite, self._n = "", 0

    def show(self, suite: str, column: str, n: int) -> None:
        self._suite, self._n = suite, n
        self._line.show(f"{suite} {column} n = {n}")

    def advance(self, work: float) -> None:
        self._line.done += work
        left, elapsed = self._line.left or 0.0, self._line.elapsed
        if not self._line.watched:
            line = {"suite": self._suite, "n": self._n, "elapsed": round(elapsed, 1), "left": round(left, 1)}
            print(json.dumps(line), file=sys.stderr, flush=True)

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.clear()
