"""Compiling a recorded launch for its architecture, and what the result takes of it. Needs no GPU."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from io import StringIO
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.compiler import ASTSource

from fulmen.gpu.architectures import Architecture
from fulmen.gpu.dry_run import Launch, target_of

TENSOR_CORE_OPS = re.compile(r"\bmma\.sync|\bwgmma\.mma_async|\btcgen05\.mma\b|\bv_mfma_")


class Resources(NamedTuple):
    """``spills``: bytes stored plus loaded (NVIDIA), or vector registers (AMD, where scalar ones are listed apart)."""

    shared: int
    registers: int
    spills: int
    scalar_spills: int
    tensor_core_ops: int
    compile_seconds: float


def key_of(launch: Launch, architecture: Architecture) -> str:
    """The same for launches of which Triton makes the same code."""
    what = triton.__version__, _source(launch).hash(), str(target_of(architecture)), sorted(launch.options.items())
    return hashlib.sha256(repr(what).encode()).hexdigest()


def resources(launch: Launch, architecture: Architecture) -> Resources:
    """Compile, whatever Triton may have kept of an earlier compilation."""
    with _told_by_ptxas() as log:
        start = time.perf_counter()
        kernel: Any = triton.compile(_source(launch), target=target_of(architecture), options=launch.options)
        seconds = round(time.perf_counter() - start, 2)
    if architecture.backend == "cuda":
        code, told = kernel.asm["ptx"], log.getvalue()
        registers = _number(r"Used (\d+) registers", told)
        spills = sum(_number(rf"(\d+) bytes spill {what}", told) for what in ("stores", "loads"))
        scalar_spills = 0
    else:
        code = kernel.asm["amdgcn"]
        registers, spills, scalar_spills = (
            _number(rf"\.{what}:\s+(\d+)", code) for what in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
        )
    return Resources(
        kernel.metadata.shared, registers, spills, scalar_spills, len(TENSOR_CORE_OPS.findall(code)), seconds
    )


def _source(launch: Launch) -> ASTSource:
    function = getattr(import_module(launch.module), launch.kernel)
    return ASTSource(function, launch.signature, launch.constants, launch.attributes)


@contextmanager
def _told_by_ptxas() -> Iterator[StringIO]:
    """Triton asks ptxas for its report anyway, and prints it on demand."""
    with knobs.nvidia.scope(), knobs.compilation.scope(), redirect_stdout(StringIO()) as log:
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        yield log


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"the compiler's report has no {pattern!r}")
    return int(found[1])
