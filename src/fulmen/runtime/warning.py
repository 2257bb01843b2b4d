"""Warnings of what a caller should know, once each."""

from __future__ import annotations

import sys
import warnings
from functools import cache


@cache
def warn_once(message: str) -> None:
    """At the line that called fulmen."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("fulmen", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
