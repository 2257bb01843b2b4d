"""The names of compiled kernels, as a profiler shows them: what a kernel computes, and not only how it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class Compiled:
    """What a kernel is compiled for: its constants, and which of its arguments are given."""

    def __init__(self, constants: dict[str, Any]) -> None:
        self._constants = constants  # arguments that are None are among them

    def __getitem__(self, constant: str) -> Any:
        return self._constants[constant]

    def has(self, argument: str) -> bool:
        return argument not in self._constants or self._constants[argument] is not None


def named(kernel: str, words: Callable[[Compiled], Iterable[str]] | None = None) -> Callable[[Any], str]:
    """For ``triton.jit(repr=...)``, which Triton calls when it compiles, never at a launch. ``words`` tell one
    compilation from another; empty ones are left out."""

    def name(specialization: Any) -> str:
        found = () if words is None else words(Compiled(specialization.constants))
        return "_".join(("fulmen", kernel, *filter(None, found)))

    return name
