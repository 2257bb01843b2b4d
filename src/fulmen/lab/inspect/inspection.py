"""`fulmen inspect`: compile every kernel for every architecture, and tell what it takes of it. Needs no GPU.

Launches are recorded first (:mod:`fulmen.lab.inspect.dry_run`), then the requested ones are compiled, each distinct one
once, and modelled (:mod:`fulmen.lab.inspect.modelling`). What was found is kept: a second run only reads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from fulmen.lab.files import write_json
from fulmen.ops.chunks.decay_form import Decays
from fulmen.runtime.architectures import ARCHITECTURES
from fulmen.runtime.availability import why_triton_is_missing
from fulmen.runtime.operators import operators

if TYPE_CHECKING:
    from fulmen.lab.cost.estimate import Cost
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
    """What one kernel takes; see :class:`fulmen.lab.inspect.compilation.Resources` and
    :class:`fulmen.lab.cost.estimate.Cost`."""

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
    cost: Cost | None  # modelled, at the sizes of the published tables
    not_modelled: str  # why, where it is None


def workloads() -> list[Workload]:
    """Of all operators, then of what they are compared with. Triton comes with them."""
    modules = [*(operator.workloads for operator in operators() if operator.workloads), BASELINES]
    return [workload for module in modules for workload in import_module(module).WORKLOADS]


def record(archs: list[str], decays: list[str], kernel: str | None, everything: bool) -> list[Labelled]:
    """The requested launches; ``kernel`` is a part of a label. ValueError names those there are, if none has it."""
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
                    ]
    chosen = [labelled for labelled in found if kernel is None or kernel in labelled.kernel]
    if not chosen:
        names = ", ".join(dict.fromkeys(labelled.kernel for labelled in found))
        raise ValueError(f"no kernel of these decays has {kernel!r} in its name; there are {names}")
    return chosen


def inspect(chosen: list[Labelled], processes: int, begin: Callable[[str], None]) -> dict[str, Resources]:
    """What the chosen launches take, by :func:`~fulmen.lab.inspect.compilation.key_of`. ``begin`` is told what was
    compiled and modelled."""
    from fulmen.lab.inspect.compilation import key_of
    from fulmen.lab.inspect.modelling import compiled_resources, examine

    of_key = {key_of(labelled.launch, ARCHITECTURES[labelled.arch]): labelled for labelled in reversed(chosen)}
    found = {}
    for key in examine(((labelled.arch, labelled.launch) for labelled in chosen), processes):
        labelled = of_key[key]
        found[key] = compiled_resources(key, labelled.arch, labelled.launch)
        begin(f"{labelled.arch} {labelled.dtype} {labelled.D}×{labelled.E} {labelled.decay} {labelled.kernel}")
    return found


def reports(archs: list[str], decays: list[str], kernel: str | None, everything: bool) -> list[Report]:
    """The requested table, compiled on all cores."""
    if missing := why_triton_is_missing():
        raise RuntimeError(missing)
    from fulmen.lab.inspect.compilation import key_of
    from fulmen.lab.inspect.modelling import cost_of
    from fulmen.lab.progress import Steps

    chosen = record(archs, decays, kernel, everything)
    with Steps(len({key_of(c.launch, ARCHITECTURES[c.arch]) for c in chosen})) as steps:
        found = inspect(chosen, os.cpu_count() or 1, steps.begin)
    table = []
    for labelled in chosen:
        architecture = ARCHITECTURES[labelled.arch]
        key = key_of(labelled.launch, architecture)
        found_cost = cost_of(key, labelled.arch, labelled.launch)
        cost, why = (None, found_cost) if isinstance(found_cost, str) else (found_cost, "")
        taken, limit = found[key]._asdict(), architecture.shared_limit
        table.append(Report(*labelled[:-1], shared_limit=limit, **taken, cost=cost, not_modelled=why))
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
    print("modelled, not measured: ms of a launch at the published sizes, cycles per token and head, programs per SM")
    print(
        f"{'arch':8}{'dtype':6}{'D×E':10}{'decay':11}{'kernel':30}{'shared':>16}{'registers':>11}{'spills':>8}{'mma':>6}"
        f"{'ms':>10}{'cycles':>9}  {'busiest':13}{'programs':>9}{'occupancy':>11}{'waves':>8}"
    )
    for r in table:
        shared = f"{r.shared}/{r.shared_limit}"
        print(
            f"{r.arch:8}{r.dtype:6}{f'{r.D}×{r.E}':10}{r.decay:11}{r.kernel:30}{shared:>16}{r.registers:>11}"
            f"{r.spills:>8}{r.tensor_core_ops:>6}{_modelled(r)}"
        )
    spilling = sum(r.spills > 0 for r in table if r.role == "kernel")
    large = sum(r.shared > r.shared_limit for r in table)
    print("\nthe most of each, over all decays, dtypes and sizes: registers, KB of shared memory, spills")
    print(summary(table))
    print(f"\n{len(table)} kernels: {spilling} spill, {large} need more shared memory than there is")
    if into is not None:
        write_json(into, [asdict(r) for r in table])
    if large:
        raise RuntimeError(f"{large} kernels need more shared memory than there is")


def _modelled(report: Report) -> str:
    cost = report.cost
    if cost is None:
        return f"  ({report.not_modelled})"
    cycles = "" if cost.cycles is None else f"{cost.cycles:.1f}"
    busiest = f"{cost.busiest} {cost.share:.0%}"
    return f"{cost.time:>10.4f}{cycles:>9}  {busiest:13}{cost.programs:>9}{cost.occupancy:>11.0%}{cost.waves:>8.2f}"
