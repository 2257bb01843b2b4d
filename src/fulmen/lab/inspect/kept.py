"""What inspections found, kept in the user's cache folder: a second run only reads, and an interrupted one goes on."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from dataclasses import asdict
from functools import cache
from pathlib import Path

import fulmen.lab.cost
from fulmen.lab.cost.estimate import Cost
from fulmen.lab.inspect.compilation import Listing, Resources
from fulmen.lab.inspect.dry_run import Launch


def resources(key: str) -> Resources | None:
    """By :func:`~fulmen.lab.inspect.compilation.key_of`."""
    path = _folder() / f"{key}.json"
    return Resources(**json.loads(path.read_text())) if path.exists() else None


def keep_resources(key: str, found: Resources) -> None:
    _write(_folder() / f"{key}.json", json.dumps(found._asdict()).encode())


def listing(key: str) -> Listing | None:
    path = _folder() / f"{key}.listing.gz"
    return Listing(*json.loads(gzip.decompress(path.read_bytes()))) if path.exists() else None


def keep_listing(key: str, found: Listing) -> None:
    _write(_folder() / f"{key}.listing.gz", gzip.compress(json.dumps(found).encode()))


def cost(key: str, launch: Launch) -> Cost | str | None:
    """Of this launch of the code, or why it is not modelled."""
    path = _of_launch(key, launch)
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    return found if isinstance(found, str) else Cost(**found)


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


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(content)
    unfinished.replace(path)


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fulmen" / "inspect"
