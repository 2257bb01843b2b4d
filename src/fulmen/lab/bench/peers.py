"""Packages of others, used where they can be imported; and where not, what to install."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

INSTALL = {
    "fla": "pip install fla-core",
    "lightning_attn": "pip install lightning-attn",
    "transformers": "pip install 'fulmen[transformers]'",
    "flash_attn": "pip install flash-attn (needs CUDA)",
}
_DISTRIBUTIONS = {"fla": "fla-core"}  # where a package is installed under another name


def versions() -> dict[str, str]:
    """Of torch and of those peers that are installed; imports none."""
    found = {package: _version(_DISTRIBUTIONS.get(package, package)) for package in ("torch", *INSTALL)}
    return {package: number for package, number in found.items() if number}


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


@cache
def why_missing(package: str) -> str:
    """Empty if the package can be imported."""
    try:
        import_module(package)
    except ImportError:
        return f"{package} is not installed: {INSTALL[package]}"
    except Exception as error:  # a package may fail in its own ways on a machine it does not know
        return f"{package} cannot be imported: {error}"
    return ""


def peer(path: str) -> Any:
    """The function at ``package.module.function``."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
