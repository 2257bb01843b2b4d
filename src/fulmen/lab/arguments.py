"""Command-line arguments and their types."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path


def unknown(what: str, name: str, known: Sequence[str]) -> str:
    """That there is no such name, and which is meant; else which there are."""
    close = get_close_matches(name.lower(), [each.lower() for each in known])
    meant = [each for each in known if each.lower().startswith(name.lower()) or each.lower() in close]
    hint = f"did you mean {', '.join(meant)}?" if meant else f"there are {', '.join(known) or 'none'}"
    return f"no {what}; {hint}"


def add_device(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cpu: the native core (default); cuda: the kernels"
    )


def whole(text: str) -> int:
    """A whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def positive(text: str) -> float:
    """A finite number above zero."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
    if not (0 < number < math.inf):
        raise argparse.ArgumentTypeError(f"must be above zero and finite, got {text}")
    return number


def output_file(text: str) -> Path:
    """A path that can be written to: told now, not after minutes of work."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder")
    return _writable(path, path.parent)


def output_folder(text: str) -> Path:
    """A path where a folder is, or can be made."""
    path = Path(text)
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"{there} is not a folder")
    return _writable(path, there)


def _writable(path: Path, folder: Path) -> Path:
    if not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{folder} cannot be written to")
    return path


def input_path(text: str) -> Path:
    """The path of a file or a folder that is there."""
    path = Path(text)
    return path if path.is_dir() else input_file(text)


def input_file(text: str) -> Path:
    """The path of a file that is there."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {path}")
    return path
