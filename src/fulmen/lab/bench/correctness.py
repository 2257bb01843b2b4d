"""Correctness first: no column is timed before it agreed with the float64 specification on a small, ragged case."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from fulmen.lab.bench.suite import Column, Sizes, Suite
from fulmen.lab.bench.workload import Material, Workload
from fulmen.lab.tolerances import relative_error

LENGTH = 131  # no multiple of any tile, and more than one chunk of 128
# The largest error allowed, relative to the largest value of the exact tensor. Peers round more often than we do, and
# are to be timed all the same; a wrong result is off by much more.
ALLOWED = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Verdict:
    error: float | None  # None: it failed
    problem: str  # why the column is not to be timed; empty if it may be


class CorrectnessCheck:
    """Checks each column once for each mode and size of head, and remembers."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self._dtype, self._device = dtype, device
        self._verdicts: dict[tuple[Hashable, ...], Verdict] = {}
        self._exact: dict[tuple[Hashable, ...], list[Tensor]] = {}

    def verdict(self, suite: Suite, column: Column, sizes: Sizes, mode: str) -> Verdict:
        sizes = suite.check_sizes(sizes)
        # Sections of a report repeat some columns.
        key = suite.name, column.function, column.takes, column.fixed, sizes, mode
        if key not in self._verdicts:
            self._verdicts[key] = self._check(suite, column, sizes, mode)
        return self._verdicts[key]

    def _check(self, suite: Suite, column: Column, sizes: Sizes, mode: str) -> Verdict:
        try:
            workload = Workload(column, Material(suite, sizes, LENGTH, self._dtype, self._device))
            key = suite.name, column.exact, column.takes, column.fixed, sizes, mode
            if key not in self._exact:
                self._exact[key] = workload.exact(mode)
            pairs = zip(workload.results(mode), self._exact[key], strict=True)
            # Unlike Python's max, that of a tensor does not lose a NaN.
            error = torch.tensor([relative_error(found, exact) for found, exact in pairs]).max().item()
        except Exception as failure:
            return Verdict(None, f"failed: {one_line(failure)}")
        allowed = ALLOWED[self._dtype]
        if not error <= allowed:
            return Verdict(error, f"wrong: off by {error:.1e} from the float64 reference ({allowed:.0e} allowed)")
        return Verdict(error, "")


def one_line(failure: BaseException) -> str:
    lines = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {lines[0]}" if lines else type(failure).__name__
