"""Progress of a command, on its error output. Without packages, so that a plain install has it, and without a thread,
which would disturb what is timed."""

from __future__ import annotations

import json
import shutil
import sys
import time

BAR = 24  # characters
INTERVAL = 5.0  # seconds between two lines, where nobody watches


class Line:
    """A bar and what runs now on a terminal; elsewhere a line of text every few seconds, or for programs one of JSON
    for each part that is done (``progress="json"``)."""

    def __init__(self, total: float, progress: str = "auto", limit: float = float("inf")) -> None:
        """``limit``: seconds after which it ends in any case."""
        self.total, self.done, self._limit = total, 0.0, limit
        self._form = progress if progress == "json" else "bar" if sys.stderr.isatty() else "text"
        self._start, self._last = time.perf_counter(), -INTERVAL

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._start

    @property
    def left(self) -> float | None:
        """Seconds, if it goes on as it went so far."""
        if not self.done:
            return None
        return max(min(self.elapsed / self.done * (self.total - self.done), self._limit - self.elapsed), 0.0)

    def show(self, what: str) -> None:
        left = "" if self.left is None else f" ({clock(self.left)} left)"
        text = f"{clock(self.elapsed)}{left} {what}"
        if self._form == "bar":
            filled = int(BAR * min(self.done / self.total, 1.0)) if self.total else 0
            bar = f"[{'#' * filled}{'.' * (BAR - filled)}] {text}"
            self._rewrite(bar[: shutil.get_terminal_size().columns - 1])
        elif self._form == "text" and self.elapsed - self._last >= INTERVAL:
            self._last = self.elapsed
            print(text, file=sys.stderr, flush=True)

    def advance(self, work: float, **facts: object) -> None:
        """A part is done; ``facts`` say which, to programs."""
        self.done += work
        if self._form == "json":
            times = {"elapsed": round(self.elapsed, 1), "left": round(self.left or 0.0, 1)}
            print(json.dumps(facts | times), file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._form == "bar":
            self._rewrite("")

    def _rewrite(self, text: str) -> None:
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)


class Steps:
    """Progress over a known number of steps."""

    def __init__(self, total: int, progress: str = "auto") -> None:
        self._line, self._total = Line(total, progress), total
        self._begun, self._running = 0, ""

    def begin(self, what: str) -> None:
        """The step before is done; ``what`` runs now."""
        self._end()
        self._begun, self._running = self._begun + 1, what
        self._line.show(f"{self._begun}/{self._total} {what}")

    def clear(self) -> None:
        """Before something else is printed."""
        self._line.clear()

    def _end(self) -> None:
        if self._begun:
            self._line.advance(1.0, step=self._running)

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        if failure is None:
            self._end()
        self.clear()


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
