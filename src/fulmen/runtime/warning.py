"""Warnings of what a caller should know, once each."""

from __future__ import annotations

import sys
import warnings
from functools import cache

from torch import Tensor

GROWTH = (
    "log_decay has a value above 0, with which the state grows from token to token: it is the natural logarithm of the "
    "decay, so that a factor of 0.9 must be given as -0.105"
)


@cache
def warn_once(message: str) -> None:
    """At the line that called fulmen."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("fulmen", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def warn_if_growing(backend: str, *log_decays: Tensor | None) -> None:
    """Of log-decays above 0. The CPU core notices them itself, as it reads them; a GPU would have to be waited for; and
    fake tensors have no values, nor storage."""
    for x in log_decays:
        if backend != "native" and x is not None and x.untyped_storage().device.type == "cpu" and (x > 0).any():
            warn_once(GROWTH)
