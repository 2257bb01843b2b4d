"""The kernels of a suite: their tiles, and what they take of an architecture's shared memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fulmen.lab.bench.report.groups import Group
from fulmen.lab.bench.suite import DTYPES, Kernels, Sizes, Suite
from fulmen.lab.bench.tables import markdown
from fulmen.lab.cost.estimate import Cost
from fulmen.runtime.architectures import ARCHITECTURES
from fulmen.runtime.availability import why_triton_is_missing

KernelReport = dict[str, Any]  # one kernel, as `fulmen inspect --json` writes it
FIELDS = {
    "chunk": "Chunk",
    "depth": "Depth",
    "width": "Width",
    "warps": "num_warps",
    "registers": "maxnreg",
    "stages": "num_stages",
    "mirrored": "Transposed state",
    "resident": "Programs per SM",
}


def load_inspection(path: Path) -> list[KernelReport]:
    """What `fulmen inspect --json` wrote."""
    try:
        reports = json.loads(path.read_text())
        wanted = {"kernel", "operator", "arch", "dtype", "D", "decay", "shared", "shared_limit", "registers", "spills"}
        if not isinstance(reports, list) or not all(wanted <= set(report) for report in reports):
            raise ValueError("it is not a list of kernels")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a file of `fulmen inspect --json`: {error}") from error
    return reports


def kernel_configuration(suite: Suite, groups: list[Group]) -> list[str]:
    """The section on tiles, of the Triton kernels from the table they are launched with, and of the CPU core; what ran
    comes first."""
    if suite.kernels is None:
        return []
    config = groups[0].any_table.config
    gpu, core = _tiles(suite.kernels, config), []
    if suite.kernels.core:
        core = ["CPU core:", markdown(["Parameter", "Value", "Notes"], map(list, suite.kernels.core))]
    return ["## Kernel Configuration", *(gpu + core if config.get("device") == "cuda" else core + gpu)]


def _tiles(kernels: Kernels, config: dict[str, Any]) -> list[str]:
    if missing := why_triton_is_missing():
        return [f"GPU: no tiles, {missing}."]
    found: list[tuple[str, list[str], dict[str, Any]]] = []
    for kernel, tile_on in kernels.tiles(Sizes.of(config), DTYPES[config["dtype"]]).items():
        alike: dict[Any, list[str]] = {}
        for architecture in ARCHITECTURES.values():
            alike.setdefault(tile_on(architecture), []).append(architecture.name)
        for tile, names in alike.items():
            found.append((kernel, names, tile._asdict()))
    fields = [field for field in FIELDS if any(field in tile for _, _, tile in found)]
    rows = [[kernel, ", ".join(names), *(_told(tile.get(field)) for field in fields)] for kernel, names, tile in found]
    about = f"GPU, {config['dim']} channels, {config['dtype']}: from a table (`triton/tiles.py`), not autotuned."
    return [about, markdown(["Kernel", "Architectures", *(FIELDS[field] for field in fields)], rows)]


def _told(value: object) -> str:
    """Of a tile's field."""
    if value is None or isinstance(value, bool):
        return "yes" if value else ""
    return str(value)


def shared_memory_budget(suite: Suite, inspected: list[KernelReport] | None) -> list[str]:
    """The section on shared memory: the kernel that takes most, for each architecture, as compiled."""
    if suite.kernels is None:
        return []
    heading = "## Shared-Memory Budget"
    if inspected is None:
        how = "`fulmen inspect --json kernels.json`, then `fulmen report RESULTS.json --inspection kernels.json`"
        return [
            heading,
            f"Not inspected for this report. It needs no GPU: {how}. More about it: `docs/sram.md`.",
        ]
    ours = [report for report in inspected if report["operator"] == suite.kernels.operator]
    rows = []
    for recompute in (False, True):
        for arch in ARCHITECTURES:
            those = [r for r in ours if r["arch"] == arch and ("recompute" in r["kernel"]) == recompute]
            if those:
                most = max(those, key=lambda report: report["shared"])
                share = f"{100 * most['shared'] / most['shared_limit']:.0f}%"
                limits = [f"{most['shared']:,}", f"{most['shared_limit']:,}", share]
                spilling = sum(report["spills"] > 0 for report in those)
                what = f"{most['kernel']}, {most['decay']}, {most['D']} channels, {most['dtype']}"
                rows.append(
                    [arch, "recompute" if recompute else "all others", what, *limits, f"{spilling} of {len(those)}"]
                )
    header = ["Architecture", "Schedule", "Kernel that takes most", "Bytes", "Limit", "Share", "Spilling"]
    return [heading, "Compiled by `fulmen inspect`, per thread block:", markdown(header, rows)]


def modelled_cost(suite: Suite, inspected: list[KernelReport] | None) -> list[str]:
    """The section on time without a card: what each kernel costs in the model of one, for the largest channels."""
    if suite.kernels is None or inspected is None:
        return []
    ours = [report for report in inspected if report["operator"] == suite.kernels.operator and report.get("cost")]
    largest = max((report["D"] for report in ours), default=0)
    rows = []
    for report in ours:
        if report["D"] == largest:
            cost = Cost(**report["cost"])
            cycles = "" if cost.cycles is None else f"{cost.cycles:.1f}"
            rows.append(
                [
                    report["arch"], f"{report['kernel']}, {report['decay']}, {report['dtype']}", f"{cost.time:.3f}",
                    cycles, f"{cost.busiest} {cost.share:.0%}", f"{cost.programs} ({cost.occupancy:.0%})",
                    f"{cost.waves:.2f}",
                ]
            )  # fmt: skip
    if not rows:
        return []
    about = (
        f"Modelled, not measured on a card (`docs/gpu_cost.md`): a launch at the published sizes, {largest} channels."
    )
    header = ["Architecture", "Kernel", "ms", "Cycles per token and head", "Busiest", "Programs per SM", "Waves"]
    return ["## Modelled Cost", about, markdown(header, rows)]
