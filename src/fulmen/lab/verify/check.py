"""What `fulmen verify` is made of. An operator's record names the module that has its ``checks``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import torch

from fulmen.runtime.operators import operators

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Target(NamedTuple):
    """What is verified."""

    device: str  # "cpu" or "cuda"
    backend: str
    quick: bool

    @property
    def interpreted(self) -> bool:
        """Whether Triton's interpreter runs the kernels, some thousand times slower than a GPU."""
        return self.backend == "triton" and self.device == "cpu"


class Check(NamedTuple):
    """
    Attributes:
        operator: the public function.
        what: the case, for people.
        run: gives what is wrong, one sentence each; nothing if all is right.
    """

    operator: str
    what: str
    run: Callable[[], list[str]]


def unusual(case: Any) -> str:
    """What distinguishes a named tuple from one with the default of every field."""
    defaults = case._field_defaults
    return ", ".join(f"{name} {value}" for name, value in case._asdict().items() if value != defaults[name]) or "plain"


def all_checks(target: Target) -> Iterator[Check]:
    for operator in operators():
        if target.backend in operator.backends:
            yield from import_module(operator.checks).checks(target)
