"""`fulmen limits`: what the machine can do at all, and how much of it the native kernels reach.

An operator's record names the module with its ``LIMITS``: functions that measure, each giving figures.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch

from fulmen.lab import layers
from fulmen.lab.bench.figures import GEMM, Call, Figure, threads_over_one
from fulmen.lab.bench.measure import interleaved
from fulmen.lab.environment import describe, environment
from fulmen.lab.files import write_json
from fulmen.lab.progress import Steps
from fulmen.runtime import core
from fulmen.runtime.operators import operators

SWEEP_BYTES = (256 << 10, 4 << 20, 256 << 20)  # within L2, within L3, from memory


def parts_of(names: list[str]) -> list[Callable[[], list[Figure]]]:
    """What measures the figures of these operators, or of "layers"; without names, of all."""
    measured = {operator.name: operator.limits for operator in operators() if operator.limits}
    measured["layers"] = layers.__name__
    if unknown := set(names) - set(measured):
        raise ValueError(f"no figures of {', '.join(sorted(unknown))}; there are {', '.join(measured)}")
    return [part for name in names or measured for part in import_module(measured[name]).LIMITS]


def run(parts: list[Callable[[], list[Figure]]], json_path: Path | None, progress: str = "auto") -> None:
    if core.core is None:
        raise RuntimeError(core.why_unavailable)
    facts = environment()
    print(describe(facts))
    figures: list[Figure] = []
    with Steps(1 + len(parts), progress) as steps, torch.no_grad():
        steps.begin("the machine")
        machine = measure_machine()
        steps.clear()
        print("\nthe machine:")
        for what, value in machine.items():
            print(f"  {what:<58}{value:>10.2f}")
        print("\nthe native kernels:")
        print(f"  {'':<58}{'measured':>10}{'must':>8}{'aim':>8}", flush=True)
        for part in parts:
            steps.begin(part.__name__.replace("_", " "))
            found = part()
            steps.clear()
            for figure in found:
                show(figure)
            figures += found
    if json_path is not None:
        rows = [figure._asdict() | {"verdict": figure.verdict} for figure in figures]
        write_json(json_path, {"environment": facts, "machine": machine, "figures": rows})


def show(figure: Figure) -> None:
    numbers = f"{figure.value:>10.2f}{figure.must:>8g}{figure.aim:>8g}"
    print(f"  {figure.what:<58}{numbers}  {figure.unit:<4} {figure.verdict}", flush=True)
    if figure.note:
        print(f"    {figure.note}", flush=True)


def measure_machine() -> dict[str, float]:
    """FMA peak and sgemm in GFLOP/s, and the bandwidth of scaling an array in place, in GB/s."""
    a, b = torch.randn(GEMM, GEMM), torch.randn(GEMM, GEMM)
    arrays = {size: torch.ones(size // 4) for size in SWEEP_BYTES}
    repeats = {size: max(1, (8 << 20) // size) for size in SWEEP_BYTES}

    def sweep(size: int) -> Call:
        return lambda: [arrays[size].mul_(1.0) for _ in range(repeats[size])]

    calls: dict[str, Call] = {"fma": core.require().fma_burst, "gemm": lambda: a @ b}
    times = interleaved(calls | {str(size): sweep(size) for size in SWEEP_BYTES}, seconds=2.0, repeats=5)
    machine = {
        "FMA peak, GFLOP/s": core.require().fma_burst() / times["fma"].median / 1e9,
        f"torch sgemm {GEMM}³, GFLOP/s": 2 * GEMM**3 / times["gemm"].median / 1e9,
    }
    machine[f"the same, {torch.get_num_threads()} threads over one"] = threads_over_one(calls["gemm"])
    for size in SWEEP_BYTES:
        moved = 2 * size * repeats[size]
        machine[f"mul_ over {size >> 10} KiB, GB/s read and written"] = moved / times[str(size)].median / 1e9
    return machine
