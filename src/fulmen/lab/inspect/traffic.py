"""Bytes of memory that recorded launches request: every load and store of all programs, without credit for caches.

What one launch of a kernel requests, its operator says: in ``BYTES`` of the module that its record names for workloads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from math import prod
from typing import Any

from fulmen.lab.inspect.dry_run import Launch
from fulmen.runtime.operators import operators

Arguments = dict[str, Any]  # of a launch, by name; tensors as fulmen.lab.inspect.dry_run.Operand
Counts = dict[str, Callable[[Arguments], int]]  # by a kernel's module and name, with a dot between them


def requested_bytes(launches: list[Launch]) -> int:
    """Loads and stores of all ``launches``; sequences must not be packed."""
    modules = tuple(operator.workloads for operator in operators() if operator.workloads)
    return sum(_counts(modules)[f"{launch.module}.{launch.kernel}"](launch.arguments) for launch in launches)


@cache
def _counts(modules: tuple[str, ...]) -> Counts:
    return {kernel: count for module in modules for kernel, count in import_module(module).BYTES.items()}


def bytes_of(operand: Any) -> int:
    """All of a tensor once, which may be that of a named tuple; 0 for None."""
    tensor = getattr(operand, "pointer", operand)
    return 0 if tensor is None else prod(tensor.shape) * tensor.itemsize
