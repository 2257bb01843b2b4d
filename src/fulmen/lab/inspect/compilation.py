"""Compiling a recorded launch for its architecture, and what the result takes of it. Needs no GPU."""

from __future__ import annotations

import ast
import hashlib
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from importlib import import_module
from io import StringIO
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.compiler import ASTSource

from fulmen.lab.cost.machines import MACHINES
from fulmen.lab.cost.sass import disassemble
from fulmen.lab.inspect.dry_run import Launch, target_of
from fulmen.runtime.architectures import Architecture
from fulmen.triton_common.triton_private import is_kernel, used_by

TENSOR_MEMORY = 512  # columns that a program may use, where there is such memory
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
    used = dict(sorted(_used_by(_function(launch)).items()))
    options = {name: value for name, value in sorted(launch.options.items()) if name != "extern_libs"}  # Triton's paths
    compiled_for = launch.signature, launch.constants, launch.attributes, options, str(target_of(architecture))
    return hashlib.sha256(repr((triton.__version__, used, compiled_for)).encode()).hexdigest()


def _used_by(function: Any, found: dict[str, str] | None = None) -> dict[str, str]:
    """The source of a function and of all it calls, and the constants they read."""
    found = {} if found is None else found
    found[f"{function.module}.{function.__name__}"] = _without_comments(function.src)
    for name, value in used_by(function).items():
        if is_kernel(value) and f"{value.module}.{value.__name__}" not in found:
            _used_by(value, found)
        elif isinstance(value, triton.language.constexpr):
            found[f"{function.module}.{name}"] = repr(value)
    return found


@cache
def _without_comments(source: str) -> str:
    return ast.unparse(ast.parse(source))


class Listing(NamedTuple):
    """The code that a launch was compiled to, as text: what the cost model reads."""

    ttir: str
    sass: str


def resources(launch: Launch, architecture: Architecture) -> Resources:
    return compile_and_list(launch, architecture)[0]


def compile_and_list(launch: Launch, architecture: Architecture) -> tuple[Resources, Listing | None]:
    """Compile, whatever Triton may have kept of an earlier compilation. A listing is made of what is modelled."""
    with _told_by_ptxas() as log:
        start = time.perf_counter()
        kernel = compiled(launch, architecture)
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
    found = Resources(
        kernel.metadata.shared, registers, spills, scalar_spills, len(TENSOR_CORE_OPS.findall(code)), seconds
    )
    if architecture.name not in MACHINES:
        return found, None
    return found, Listing(kernel.asm["ttir"], disassemble(kernel.asm["cubin"]))


def compiled(launch: Launch, architecture: Architecture) -> Any:
    source = ASTSource(_function(launch), launch.signature, launch.constants, launch.attributes)
    kernel = triton.compile(source, target=target_of(architecture), options=launch.options)
    columns = getattr(kernel.metadata, "tmem_size", None) or 0
    if columns > TENSOR_MEMORY:  # Triton makes a kernel of it that does nothing, and complains when it is launched
        there_are = f"of {TENSOR_MEMORY} that {architecture.name} has"
        raise RuntimeError(f"{launch.kernel} needs {columns} columns of tensor memory, {there_are}")
    return kernel


def _function(launch: Launch) -> Any:
    return getattr(import_module(launch.module), launch.kernel)


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
