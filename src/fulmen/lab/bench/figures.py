"""The figures of `fulmen limits`: a measured ratio beside what it must reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from fulmen.lab.bench.measure import interleaved
from fulmen.runtime import core

GEMM = 2048  # the cube of torch's sgemm that others are compared with
Call = Callable[[], object]


class Figure(NamedTuple):
    """One result, with what it must reach and what we aim for; ``note`` says what it is made of."""

    what: str
    value: float
    must: float
    aim: float
    unit: str
    less_is_better: bool = False
    note: str = ""

    @property
    def verdict(self) -> str:
        sign = -1 if self.less_is_better else 1
        if sign * self.value >= sign * self.aim:
            return "aim reached"
        return "reached" if sign * self.value >= sign * self.must else "missed"


def multiplies_bfloat16(operator: str) -> bool:
    """Whether the build in use multiplies bfloat16 as it is, in pairs or tiles. Marks of bfloat16 are meant for such a
    CPU: where it does not, this says that an operator's figures are left out."""
    build = core.require()
    multiplies = build.multiplies_pairs or build.multiplies_tiles
    if not multiplies:
        print(f"left out: bf16 figures of {operator}, as the build {build.isa} multiplies no bfloat16")
    return multiplies


def threads_over_one(call: Call) -> float:
    """How many times faster a call is on all threads than on one."""
    threads = torch.get_num_threads()

    def serial() -> object:
        torch.set_num_threads(1)
        try:
            return call()
        finally:
            torch.set_num_threads(threads)

    t = interleaved({"serial": serial, "parallel": call}, seconds=2.0, repeats=9)
    return t["serial"].median / t["parallel"].median
