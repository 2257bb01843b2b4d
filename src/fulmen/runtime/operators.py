"""What an operator is: declared once, in its own folder, and found from there by everything else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Operator:
    """One operator. Modules are named, and imported when somebody asks for them, so that ``import fulmen`` stays light.

    Attributes:
        name: of its folder.
        protocol: what the module of each of its backends has.
        backends: these modules, by the backend's name.
        checks: whose ``checks(target)`` `fulmen verify` runs.
        workloads: whose ``WORKLOADS`` `fulmen inspect` compiles, and whose ``BYTES`` say what each kernel requests;
            empty: no kernels.
        limits: whose ``LIMITS`` `fulmen limits` measures; empty: none.
    """

    name: str
    protocol: type
    backends: Mapping[str, str]
    checks: str
    workloads: str = ""
    limits: str = ""

    def __post_init__(self) -> None:
        _declared[self.name] = self

    def backend(self, name: str) -> Any:
        return _module(self.backends[name])


_declared: dict[str, Operator] = {}
_module = cache(import_module)


def operators() -> list[Operator]:
    """All that were declared, in the order in which ``fulmen`` imports them."""
    return list(_declared.values())


def backends_of(operator: str) -> Mapping[str, str]:
    """The modules of an operator's backends, by the backend's name."""
    return _declared[operator].backends
