"""Where the time of a run goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Spending:
    """Seconds by what they were spent on; the rest of the whole is the harness itself."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[what] = self._seconds.get(what, 0.0) + time.perf_counter() - start

    def as_json(self) -> dict[str, float]:
        total = time.perf_counter() - self._start
        seconds = self._seconds | {"harness": total - sum(self._seconds.values()), "total": total}
        return {what: round(value, 3) for what, value in seconds.items()}
