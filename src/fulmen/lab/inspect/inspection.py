"""`fulmen inspect`: compile every kernel for every architecture, and tell what it takes of it. Needs no GPU.

Launches are recorded first (:mod:`fulmen.lab.inspect.dry_run`), then the requested ones are compiled, each distinct one
once, and what was found is kept: a second run only reads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import torch

from fulmen.ops.chunks.decay_form import Decays
from fulmen.runtime.architectures import ARCHITECTURES
from fulmen.runtime.availability import why_triton_is_missing
from fulmen.runtime.operators import operators

if TYPE_CHECKING:
    from fulmen.lab.inspect.compilation import Resources
    from fulmen.lab.inspect.dry_run import Launch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SIZES = ((64, 64), (128, 128))
ALL_SIZES = (*SIZES, (256, 256), (128, 64))
# What kernels are inspected with, by name: the decays of the published tables, all but "head" learnable.
DECAYS = {name: Decays.named(name) for name in ("none", "head", "token", "channel", "channel+value")}
DECAYS["learnable head"] = DECAYS["head"]
BASELINES = "fulmen.lab.baselines.workloads"


class Shape(NamedTuple):
    """One point of the matrix that a workload is run for."""

    dtype: torch.dtype
    D: int
    E: int
    decay: str  # of DECAYS

    @property
    def decays(self) -> Decays:
        return DECAYS[self.decay]

    @property
    def learnable(self) -> bool:
        """Whether a backward computes the gradient of the decays."""
        return self.decay != "head"


class Workload(NamedTuple):
    """The calls that make one operator launch each of its kernels.

    Attributes:
        name: of the operator.
        role: "kernel", or "baseline" for what ours is compared with.
        decays: those of :data:`DECAYS` it has; ("none",) for an operator without.
        launch: called in a dry run with the list that launches are recorded in; yields each with a label that says
            what it is for.
    """

    name: str
    role: str
    decays: tuple[str, ...]
    launch: Callable[[list[Launch], Shape], Iterator[tuple[str, Launch]]]


class Labelled(NamedTuple):
    """A launch and where in the table it stands."""

    kernel: str
    operator: str
    role: str
    arch: str
    dtype: str
    D: int
    E: int
    decay: str
    launch: Launch


@dataclass(frozen=True)
class Report:
    """What one kernel takes; see :class:`fulmen.lab.inspect.compilation.Resources`."""

    kernel: str
    operator: str
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
    scalar_spills: int
    tensor_core_ops: int
    compile_seconds: float


def workloads() -> list[Workload]:
    """Of all operators, then of what they are compared with. Triton comes with them."""
    modules = [*(operator.workloads for operator in operators() if operator.workloads), BASELINES]
    return [workload for module in modules for workload in import_module(module).WORKLOADS]


def record(archs: list[str], decays: list[str], kernel: str | None, everything: bool) -> list[Labelled]:
    """The requested launches; ``kernel`` is a part of a label."""
    from fulmen.lab.inspect.dry_run import dry_run

    dtypes, sizes = (tuple(DTYPES), ALL_SIZES) if everything else (("bf16",), SIZES)
    shapes = [(dtype, d, e) for dtype in dtypes for d, e in sizes]
    found = []
    for arch in archs:
        for workload in workloads():
            for decay in (decay for decay in workload.decays if decay in decays):
                for dtype, d, e in shapes:
                    with dry_run(ARCHITECTURES[arch]) as (launches, _):
                        labelled = dict(workload.launch(launches, Shape(DTYPES[dtype], d, e, decay)))
                    found += [
                        Labelled(label, workload.name, workload.role, arch, dtype, d, e, decay, launch)
                        for label, launch in labelled.items()
                        if kernel is None or kernel in label
                    ]
    return found


def inspect(chosen: list[Labelled], processes: int, begin: Callable[[str], None]) -> dict[str, Resources]:
    """What the chosen launches take, by :func:`~fulmen.lab.inspect.compilation.key_of`. ``begin`` is told what is
    compiled."""
    from fulmen.lab.inspect.compilation import key_of

    missing: dict[str, Labelled] = {}
    found: dict[str, Resources] = {}
    for labelled in chosen:
        key = key_of(labelled.launch, ARCHITECTURES[labelled.arch])
        if key not in found and key not in missing:
            kept = _kept(key)
            if kept is None:
                missing[key] = labelled
            else:
                found[key] = kept
    if not missing:
        return found
    with TemporaryDirectory() as folder:
        pool = ProcessPoolExecutor(
            min(processes, len(missing)), get_context("spawn"), initializer=_let_triton_write_to, initargs=(folder,)
        )
        with pool:
            running = {pool.submit(_compile, key, labelled): key for key, labelled in missing.items()}
            begin(f"{len(running)} kernels")
            for done in as_completed(running):
                key = running[done]
                found[key] = done.result()
                labelled = missing[key]
                begin(f"{labelled.arch} {labelled.dtype} {labelled.D}×{labelled.E} {labelled.decay} {labelled.kernel}")
    return found


def _let_triton_write_to(folder: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = folder


def _compile(key: str, labelled: Labelled) -> Resources:
    from fulmen.lab.inspect.compilation import resources

    try:
        found = resources(labelled.launch, ARCHITECTURES[labelled.arch])
    except Exception as error:
        raise RuntimeError(f"{labelled[:-1]} does not compile: {error}") from error
    _keep(key, found)
    return found


def _kept(key: str) -> Resources | None:
    from fulmen.lab.inspect.compilation import Resources

    path = _cache() / f"{key}.json"
    return Resources(**json.loads(path.read_text())) if path.exists() else None


def _keep(key: str, found: Resources) -> None:
    path = _cache() / f"{key}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(found._asdict()))
    unfinished.replace(path)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fulmen" / "inspect"


def reports(archs: list[str], decays: list[str], kernel: str | None, everything: bool) -> list[Report]:
    """The requested table, compiled on all cores."""
    if missing := why_triton_is_missing():
        raise RuntimeError(missing)
    from fulmen.lab.inspect.compilation import key_of
    from fulmen.lab.progress import Steps

    chosen = record(archs, decays, kernel, everything)
    if not chosen:
        raise ValueError(f"no kernel of these decays has {kernel!r} in its name")
    with Steps(len({key_of(c.launch, ARCHITECTURES[c.arch]) for c in chosen})) as steps:
        found = inspect(chosen, os.cpu_count() or 1, steps.begin)
    table = []
    for labelled in chosen:
        architecture = ARCHITECTURES[labelled.arch]
        taken = found[key_of(labelled.launch, architecture)]._asdict()
        table.append(Report(*labelled[:-1], shared_limit=architecture.shared_limit, **taken))
    return table


def summary(table: list[Report]) -> str:
    """The most that a kernel takes on each architecture, as a Markdown table."""
    archs, kernels = (list(dict.fromkeys(getattr(r, name) for r in table)) for name in ("arch", "kernel"))

    def cell(kernel: str, arch: str) -> str:
        chosen = [r for r in table if (r.kernel, r.arch) == (kernel, arch)]
        if not chosen:
            return ""
        registers, shared, spills = (
            max(getattr(r, name) for r in chosen) for name in ("registers", "shared", "spills")
        )
        return f"{registers}, {shared / 1024:.0f}" + (f", **{spills}**" if spills else "")

    lines = [["kernel", *archs], ["---"] * (len(archs) + 1)]
    lines += [[kernel, *(cell(kernel, arch) for arch in archs)] for kernel in kernels]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def run(archs: list[str], decays: list[str], kernel: str | None, everything: bool, into: Path | None) -> None:
    """Print a table, and what does not fit or spills below it; also write JSON if requested."""
    table = reports(archs, decays, kernel, everything)
    print(
        f"{'arch':8}{'dtype':6}{'D×E':10}{'decay':11}{'kernel':30}{'shared':>16}{'registers':>11}{'spills':>8}{'mma':>6}"
    )
    for r in table:
        shared = f"{r.shared}/{r.shared_limit}"
        print(
            f"{r.arch:8}{r.dtype:6}{f'{r.D}×{r.E}':10}{r.decay:11}{r.kernel:30}{shared:>16}{r.registers:>11}"
            f"{r.spills:>8}{r.tensor_core_ops:>6}"
        )
    spilling = sum(r.spills > 0 for r in table if r.role == "kernel")
    large = sum(r.shared > r.shared_limit for r in table)
    print("\nthe most of each, over all decays, dtypes and sizes: registers, KB of shared memory, spills")
    print(summary(table))
    print(f"\n{len(table)} kernels: {spilling} spill, {large} need more shared memory than there is")
    if into is not None:
        into.write_text(json.dumps([asdict(r) for r in table], indent=1))
    if large:
        raise RuntimeError(f"{large} kernels need more shared memory than there is")
