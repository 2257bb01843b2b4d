"""What a cell will need, before it runs: time from shorter lengths, memory from a rehearsal on fake tensors."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from fulmen.lab.bench.compiled import Compiled
from fulmen.lab.bench.results import Table
from fulmen.lab.bench.suite import Column, Sizes, Suite
from fulmen.lab.bench.workload import Material, Workload
from fulmen.lab.inspect.memory import Memory
from fulmen.runtime.torch_private import fake_tensors


def seconds_per_call(table: Table, column: Column, n: int) -> float | None:
    """What it took in an earlier sitting. Else from the longest lengths measured before, if only by a first call that
    took too long; None if there are none.

    One length tells nothing of the growth, which is then the column's own; of two, short ones have grown less than long
    ones will, so half a power is added.
    """
    cells = (cell for cell in table.cells if cell.column == column.name)
    times = {cell.n: time / 1e3 for cell in cells if (time := cell.value or cell.first_call)}
    if n in times:
        return times[n]
    before = sorted(length for length in times if length < n)[-2:]
    if not before:
        return None
    last, growth = before[-1], float(column.growth)
    if len(before) == 2:
        seen = math.log(times[last] / times[before[0]]) / math.log(last / before[0])
        growth = min(growth, max(seen, 0.0) + 0.5)
    return times[last] * (n / last) ** growth


def peak_bytes(suite: Suite, column: Column, sizes: Sizes, n: int, dtype: torch.dtype, mode: str) -> int:
    """Inputs included. Fused operators show no workspace here; it is small."""
    if isinstance(column.function, Compiled):
        column = replace(column, function=column.function.function)
    with fake_tensors(), Memory() as memory:
        workload = Workload(column, Material(suite, sizes, n, dtype, "cpu"))
        workload.forward() if mode == "fwd" else workload.backward()
    return memory.peak
