"""The suites: for each published report a module with its ``SUITE``, and beside it a data file with its figures.

Whatever lies in this folder is a suite: a new one is a module and a data file, and nothing else is edited.
"""

from __future__ import annotations

import json
from importlib import import_module
from pkgutil import get_data, iter_modules
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


def document(name: str) -> dict[str, Any]:
    """A suite's data file: "source", "gpu", and "tables" with their texts, cell by cell."""
    content = get_data(f"{__name__}.{name}", f"{name}.json")
    assert content is not None  # modules of files can give their neighbours
    return json.loads(content)
