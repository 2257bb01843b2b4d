"""Which Triton is installed."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


def triton_version() -> str | None:
    """None if there is none. Imports it only where torch for ROCm brought it under another name."""
    if find_spec("triton") is None:
        return None
    try:
        return version("triton")
    except PackageNotFoundError:
        return import_module("triton").__version__


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without what may follow them: (3, 7, 1) of "3.7.1+git0a1b2c"."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return () if numbers is None else tuple(map(int, numbers[0].split(".")))
