"""Files that are whole or not there: what replaces them is written beside them first."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces the file in one step, so that a reader, or whoever comes after a crash, finds the old or the new one."""
    if path.exists() and not path.is_file():  # a pipe or /dev/stdout: nothing to be replaced
        path.write_bytes(content)
        return
    target = path.resolve()  # a link stays one
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")
