"""The suites: modules with a ``SUITE`` each. Beside that of a published report lies a data file with its figures.

Whatever lies in this folder is a suite: a new one is a module and perhaps a data file, and nothing else is edited.
"""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulmen.lab.bench.suite import Suite


def names() -> tuple[str, ...]:
    """Of all suites. None is imported for it, so that the command line is quick."""
    return tuple(module.name for module in iter_modules(__path__))


def find(name: str) -> Suite:
    if name not in names():
        raise ValueError(f"no suite {name!r}; there are {', '.join(names())}")
    return import_module(f"{__name__}.{name}").SUITE


def reports() -> tuple[str, ...]:
    """The names of those that reproduce a published report."""
    return tuple(name for name in names() if _data_file(name).is_file())


def document(name: str) -> dict[str, Any]:
    """A report's data file: "source", "gpu", and "tables" with their texts, cell by cell."""
    return json.loads(_data_file(name).read_text(encoding="utf-8"))


def _data_file(name: str) -> Path:
    """Beside the module."""
    found = find_spec(f"{__name__}.{name}")
    assert found is not None
    assert found.origin is not None  # suites are modules of files
    return Path(found.origin).with_suffix(".json")
