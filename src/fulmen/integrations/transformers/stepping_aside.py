"""Where Fulmen cannot compute what a model asks, transformers' own function does, and a warning says so once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from fulmen.integrations.transformers.packing import packed

_said: set[tuple[object, ...]] = set()


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
            argument = str(refusal).partition(" ")[0]  # which refusals name first; shapes and values follow
            say_once(
                (ours.__name__, type(refusal), argument),
                f"{ours.__name__} stays transformers' own where Fulmen does not take an argument: {refusal}",
            )
        return original(*args, **kwargs)

    return function


def say_once(what: tuple[object, ...], text: str) -> None:
    if what not in _said:
        _said.add(what)
        warnings.warn(text, stacklevel=3)
