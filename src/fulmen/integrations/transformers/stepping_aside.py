"""Where Fulmen cannot compute what a model asks, transformers' own function does, and a warning says so once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from fulmen.integrations.transformers.packing import packed

_said: set[tuple[str, str]] = set()


def or_original(ours: Callable[..., Any], original: Callable[..., Any], *, packs: bool) -> Callable[..., Any]:
    """``ours``, or ``original`` for arguments that Fulmen refuses; it refuses before any work, and says which.

    Packed sequences that we cannot keep apart never reach a function that would let them leak: either all of a mixer's
    functions are ours (``packs``) and an error stays an error, or the original decides.
    """

    def function(*args: Any, **kwargs: Any) -> Any:
        is_packed = bool(packed(kwargs))
        if is_packed and not packs:
            return original(*args, **kwargs)
        try:
            return ours(*args, **kwargs)
        except (TypeError, ValueError) as refusal:
            if is_packed:
                raise
            _say_once(ours.__name__, str(refusal))
        return original(*args, **kwargs)

    return function


def _say_once(name: str, refusal: str) -> None:
    if (name, refusal) not in _said:
        _said.add((name, refusal))
        warnings.warn(f"{name} stays transformers' own where Fulmen does not take an argument: {refusal}", stacklevel=3)
