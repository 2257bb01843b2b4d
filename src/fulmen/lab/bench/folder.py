"""The folder of a run: one writer at a time, and nothing in it of an earlier run but its results."""

from __future__ import annotations

import fcntl
import os
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TextIO

from fulmen.lab.bench import suites
from fulmen.lab.bench.cli import RESULTS
from fulmen.lab.bench.results import now

LOCK, HISTORY = ".lock", "history"


class Folder:
    """Held until it is closed, or until the process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError if another process holds it."""
        path.mkdir(parents=True, exist_ok=True)
        self.path, self.results = path, path / RESULTS
        self._lock = _held(path)

    def begin(self) -> None:
        """The results of the run before are kept in ``history``, under their date, to be compared with; what was made
        of them is removed."""
        if self.results.exists():
            ended = datetime.fromtimestamp(self.results.stat().st_mtime, timezone.utc)
            while (kept := self._kept(ended)).exists():  # two runs may end in the same millisecond
                ended += timedelta(milliseconds=1)
            kept.parent.mkdir(exist_ok=True)
            os.replace(self.results, kept)
        reports = [self.path / name for name in ("report.html", "results.csv", *(f"{s}.md" for s in suites.names()))]
        plots = [plot for suite in suites.names() for plot in self.path.glob(f"plots/{suite}-*.png")]
        for made in (*reports, *plots):
            made.unlink(missing_ok=True)

    def _kept(self, ended: datetime) -> Path:
        return self.path / HISTORY / f"{ended.isoformat(timespec='milliseconds').replace(':', '-')[:-6]}.json"

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _held(path: Path) -> TextIO:
    # Not with "w": the file tells who holds it, until it is ours.
    lock = (path / LOCK).open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        lock.close()
        raise ValueError(f"{path} is in use by {holder}; wait for it, or give another --out") from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()}, started {now()}")
    lock.flush()
    return lock
