"""`fulmen inspect`: compile every kernel for every architecture, and tell what it takes of it. Needs no GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fulmen.gpu.architectures import ARCHITECTURES, GATE, Architecture, interpreted

TENSOR_CORE_OPS = re.compile(r"\bmma\.sync|\bwgmma\.mma_async|\btcgen05\.mma\b|\bv_mfma_")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SIZES = ((64, 64), (128, 128))
ALL_SIZES = (*SIZES, (256, 256), (128, 64))
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fulmen"


class Task(NamedTuple):
    """What one process compiles at a time."""

    arch: str
    dtype: str
    decay: str
    D: int
    E: int


@dataclass(frozen=True)
class Report:
    """What one kernel takes. ``spills``: bytes stored plus loaded (NVIDIA), or vector registers (AMD)."""

    kernel: str
    role: str
    arch: str
    dtype: str
    D: int
    E: int
    decay: str
    shared: int
    shared_limit: int
    registers: int
    spills: int
    tensor_core_ops: int
    compile_seconds: float


def tasks(archs: Iterable[str], decays: Iterable[str], everything: bool) -> list[Task]:
    dtypes, sizes = (tuple(DTYPES), ALL_SIZES) if everything else (("bf16",), SIZES)
    return [Task(a, dtype, decay, d, e) for a in archs for decay in decays for dtype in dtypes for d, e in sizes]


def inspect(chosen: list[Task], kernels: str | None, processes: int) -> Iterable[tuple[Task, list[Report]]]:
    """The reports of each task as they come in; ``kernels`` is a part of a kernel's name."""
    if interpreted():
        raise RuntimeError("unset TRITON_INTERPRET: kernels that are interpreted are not compiled")
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(run_task, task, kernels): task for task in chosen}
        for done in as_completed(running):
            yield running[done], done.result()


def run_task(task: Task, kernels: str | None = None) -> list[Report]:
    # Before triton is imported. What it compiled stays there, so a second run only reads.
    os.environ.setdefault("TRITON_CACHE_DIR", str(CACHE / "triton"))
    from fulmen.gpu import workloads, workloads_gate
    from fulmen.gpu.dry_run import compiled, dry_run

    architecture = ARCHITECTURES[task.arch]
    reports = []
    started = time.perf_counter()
    with dry_run(architecture) as (launches, _):
        size = DTYPES[task.dtype], task.D, task.E
        if task.decay == GATE:
            found = workloads_gate.labelled_launches(launches, *size)
        else:
            found = workloads.labelled_launches(launches, task.decay, *size)
        seconds = (time.perf_counter() - started) / max(len(found), 1)
        by_hash = compiled()
        for name, launch in found.items():
            if kernels is None or kernels in name:
                usage = resources(by_hash[launch.metadata.hash], architecture)
                reports.append(
                    Report(
                        name, "kernel", *task[:2], task.D, task.E, task.decay, launch.metadata.shared,
                        architecture.shared_limit, usage["registers"], usage["spills"], usage["tensor_core_ops"],
                        round(seconds, 2),
                    )
                )  # fmt: skip
    return reports


def resources(kernel: Any, architecture: Architecture) -> dict[str, int]:
    """Registers, spills and tensor-core instructions of a compiled kernel, kept by its hash."""
    kept = CACHE / "resources" / f"{kernel.hash}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    if architecture.backend == "cuda":
        code = kernel.asm["ptx"]
        found = _ask_ptxas(code, architecture)
    else:
        code = kernel.asm["amdgcn"]
        found = {
            "registers": _number(r"\.vgpr_count:\s+(\d+)", code),
            "spills": _number(r"\.vgpr_spill_count:\s+(\d+)", code),
        }
    found["tensor_core_ops"] = len(TENSOR_CORE_OPS.findall(code))
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(found))
    return found


def _ask_ptxas(ptx: str, architecture: Architecture) -> dict[str, int]:
    """Assemble once more, with the flags Triton uses, for what ptxas has to say."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"^\.target (\S+?)[,\s]", ptx, re.MULTILINE)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [get_ptxas(architecture.target).path, "-lineinfo", "-v", "--regAllocOptLevel=2"]
        command += [f"--gpu-name={target[1]}", str(source), "-o", str(Path(folder, "kernel.cubin"))]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stores, loads = (_number(rf"(\d+) bytes spill {what}", log) for what in ("stores", "loads"))
    return {"registers": _number(r"Used (\d+) registers", log), "spills": stores + loads}


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"the compiler's report has no {pattern!r}")
    return int(found[1])


def run(archs: list[str], decays: list[str], kernel: str | None, everything: bool, into: Path | None) -> None:
    """Print a table, and what does not fit or spills below it; also write JSON if asked."""
    from fulmen.bench.progress import Steps

    chosen = tasks(archs, decays, everything)
    reports: list[Report] = []
    with Steps(len(chosen)) as steps:
        steps.begin("compiling")
        for task, found in inspect(chosen, kernel, os.cpu_count() or 1):
            reports += found
            steps.begin(" ".join(map(str, task)))
    reports.sort(key=lambda r: (list(ARCHITECTURES).index(r.arch), r.D, r.E, r.dtype, r.decay))
    print(
        f"{'arch':8}{'dtype':6}{'D×E':10}{'decay':11}{'kernel':24}{'shared':>16}{'registers':>11}{'spills':>8}{'mma':>6}"
    )
    for r in reports:
        shared = f"{r.shared}/{r.shared_limit}"
        print(
            f"{r.arch:8}{r.dtype:6}{f'{r.D}×{r.E}':10}{r.decay:11}{r.kernel:24}{shared:>16}{r.registers:>11}"
            f"{r.spills:>8}{r.tensor_core_ops:>6}"
        )
    spilling, large = sum(r.spills > 0 for r in reports), sum(r.shared > r.shared_limit for r in reports)
    print(f"{len(reports)} kernels: {spilling} spill, {large} need more shared memory than there is")
    if into is not None:
        into.write_text(json.dumps([asdict(r) for r in reports], indent=1))
