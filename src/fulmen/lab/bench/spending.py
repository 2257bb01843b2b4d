"""Where the time of a run goes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Spending:
    """Seconds by what they were spent on; the rest of the whole is the harness itself. ``before`` are those of an
    earlier sitting, as :meth:`as_json` gave them."""

    def __init__(self, before: Mapping[str, float]) -> None:
        self._start = time.perf_counter() - before.get("total", 0.0)
        self._seconds = {what: value for what, value in before.items() if what not in ("harness", "total")}

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
