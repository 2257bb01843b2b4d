"""What inspections found, kept in the user's cache folder: a second run only reads, and an interrupted one goes on.

A file that is damaged, or of another version, counts for nothing, and is replaced.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TypeVar

import fulmen.lab.cost
from fulmen.lab.cost.estimate import Cost
from fulmen.lab.files import write_bytes
from fulmen.lab.inspect.compilation import Listing, Resources
from fulmen.lab.inspect.dry_run import Launch

_Found = TypeVar("_Found")


def resources(key: str) -> Resources | None:
    """By :func:`~fulmen.lab.inspect.compilation.key_of`."""
    return _read(_folder() / f"{key}.json", lambda content: Resources(**json.loads(content)))


def keep_resources(key: str, found: Resources) -> None:
    _write(_folder() / f"{key}.json", json.dumps(found._asdict()).encode())


def listing(key: str) -> Listing | None:
    return _read(_folder() / f"{key}.listing.gz", lambda content: Listing(*json.loads(gzip.decompress(content))))


def keep_listing(key: str, found: Listing) -> None:
    _write(_folder() / f"{key}.listing.gz", gzip.compress(json.dumps(found).encode()))


def cost(key: str, launch: Launch) -> Cost | str | None:
    """Of this launch of the code, or why it is not modelled."""

    def parse(content: bytes) -> Cost | str:
        found = json.loads(content)
        return found if isinstance(found, str) else Cost(**found)

    return _read(_of_launch(key, launch), parse)


def keep_cost(key: str, launch: Launch, found: Cost | str) -> None:
    _write(_of_launch(key, launch), json.dumps(found if isinstance(found, str) else asdict(found)).encode())


def _of_launch(key: str, launch: Launch) -> Path:
    """The model is part of it: what another version of it said does not count."""
    what = hashlib.sha256(repr((_model(), launch.grid, launch.arguments)).encode()).hexdigest()
    return _folder() / f"{key}.{what[:16]}.cost.json"


@cache
def _model() -> str:
    sources = sorted(Path(fulmen.lab.cost.__path__[0]).glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def _read(path: Path, parse: Callable[[bytes], _Found]) -> _Found | None:
    try:
        return parse(path.read_bytes())
    except (OSError, EOFError, zlib.error, ValueError, TypeError):
        return None


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, content)


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fulmen" / "inspect"
