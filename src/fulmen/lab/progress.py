"""Progress of a command, as one line on the error output of a terminal. Without packages, so that a plain install has
it, and without a thread, which would disturb what is timed."""

from __future__ import annotations

import shutil
import sys
import time

BAR = 24  # characters


class Line:
    """A bar and what runs now; nothing where nobody watches."""

    def __init__(self, total: float) -> None:
        self.total, self.done, self.watched = total, 0.0, sys.stderr.isatty()
        self._start = time.perf_counter()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._start

    @property
    def left(self) -> float | None:
        """Seconds, if it goes on as it went so far."""
        return self.elapsed / self.done * (self.total - self.done) if self.done else None

    def show(self, what: str) -> None:
        filled = int(BAR * min(self.done / self.total, 1.0)) if self.total else 0
        left = "" if self.left is None else f" ({clock(self.left)} left)"
        text = f"[{'#' * filled}{'.' * (BAR - filled)}] {clock(self.elapsed)}{left} {what}"
        self._write(text[: shutil.get_terminal_size().columns - 1])

    def clear(self) -> None:
        self._write("")

    def _write(self, text: str) -> None:
        if self.watched:
            print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)


class Steps:
    """Progress over a known number of steps."""

    def __init__(self, total: int) -> None:
        self._line, self._begun = Line(total), 0

    def begin(self, what: str) -> None:
        """The step before is done; ``what`` runs now."""
        self._line.done, self._begun = float(self._begun), self._begun + 1
        self._line.show(f"{self._begun}/{self._line.total} {what}")

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.clear()


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
