"""Types of command-line arguments."""

from __future__ import annotations

import argparse
from pathlib import Path


def output_file(text: str) -> Path:
    """A path that can be written to: told now, not after minutes of work."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder")
    return path


def output_folder(text: str) -> Path:
    """A path where a folder is, or can be made."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is not a folder")
    return path


def input_file(text: str) -> Path:
    """The path of a file that is there."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {path}")
    return path
