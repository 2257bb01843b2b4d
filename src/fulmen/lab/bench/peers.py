"""Packages of others, used where they can be imported; and where not, what to install."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from importlib.metadata import distributions
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

INSTALL = {
    "fla": "pip install fla-core",
    "lightning_attn": "pip install lightning-attn",
    "transformers": "pip install 'fulmen[transformers]'",
    "flash_attn": "pip install flash-attn (needs CUDA)",
}
_DISTRIBUTIONS = {"fla": "fla-core"}  # where a package is installed under another name
# The environment variable that names a folder of packages to compare with which are not installed: where fla is,
# transformers calls its kernels, on CPUs too, and they fail.
FOLDER = "FULMEN_PEERS"


def versions() -> dict[str, str]:
    """Of torch and of those peers that are installed; imports none."""
    found = {package: version_of(package) for package in ("torch", *INSTALL)}
    return {package: number for package, number in found.items() if number}


def version_of(package: str) -> str:
    """Empty if it is not installed."""
    found = distributions(name=_DISTRIBUTIONS.get(package, package), path=_folders())
    return next((distribution.version for distribution in found), "")


def _folders() -> list[str]:
    """Where packages are looked for."""
    return [*sys.path, *filter(None, [os.environ.get(FOLDER)])]


@cache
def why_missing(package: str) -> str:
    """Empty if the package can be imported, or the one file of it that is named: ``"fla/ops/kda/naive.py"``."""
    package, _, file = package.partition("/")
    try:
        found = one_file(package, file) if file else import_module(package)
    except ImportError:
        found = None
    except Exception as error:  # a package may fail in its own ways on a machine it does not know
        return f"{package} cannot be imported: {error}"
    if found:
        return ""
    if file:  # beside the environment: there, others would find the package too
        distribution = _DISTRIBUTIONS.get(package, package)
        return f"{package} is not there: pip install --no-deps --target DIR {distribution}, and {FOLDER}=DIR"
    return f"{package} is not installed: {INSTALL[package]}"


@cache
def one_file(package: str, file: str) -> ModuleType | None:
    """A file of a package, imported without the package around it, which may need a GPU; None if it is not there."""
    for path in (Path(folder, package, file) for folder in _folders()):
        if path.is_file() and (spec := spec_from_file_location(f"{package}_{path.stem}", path)) and spec.loader:
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    return None


def peer(path: str) -> Any:
    """The function at ``package.module.function``."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
