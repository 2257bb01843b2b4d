"""The kernels behind a suite: their tiles, and what they take of an architecture's shared memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from fulmen.bench.report.groups import Group
from fulmen.bench.tables import markdown
from fulmen.gpu.architectures import ARCHITECTURES
from fulmen.gpu.tiles import Tile, scan_tile

KernelReport = dict[str, Any]  # one kernel, as `fulmen inspect --json` writes it
LINEAR_ATTENTION = ("state", "lasd", "la3")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NATIVE = (
    ("chunk", "16", "Tokens walked at once"),
    ("panel", "16 columns", "Of the state: all rows of a panel stay in L1"),
    ("registers", "6 × 16 (AVX2, NEON), 16 × 16 (AVX-512)", "Results the micro-kernel holds"),
)


def load_inspection(path: Path) -> list[KernelReport]:
    """What `fulmen inspect --json` wrote."""
    try:
        reports = json.loads(path.read_text())
        wanted = {"kernel", "role", "arch", "dtype", "D", "decay", "shared", "shared_limit", "registers", "spills"}
        if not isinstance(reports, list) or not all(wanted <= set(report) for report in reports):
            raise ValueError("it is not a list of kernels")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a file of `fulmen inspect --json`: {error}") from error
    return reports


def kernel_configuration(suite: str, groups: list[Group]) -> list[str]:
    """The section on tiles: of the Triton kernels, from the table they are launched with, and of the CPU core."""
    if suite not in LINEAR_ATTENTION:
        return []
    config = groups[0].any_table.config
    dim, dtype = config.get("dim", 128), DTYPES.get(config.get("dtype", "bf16"), torch.bfloat16)
    channel = suite == "state"
    walks = {
        "Forward": {"gradient": False, "small": False},
        "Backward, collecting a decay's gradient": {"gradient": True, "small": False},
        'Backward of schedule="recompute"': {"gradient": False, "small": True},
    }
    rows = []
    for walk, what in walks.items():
        alike: dict[Tile, list[str]] = {}
        for architecture in ARCHITECTURES.values():
            tile = scan_tile(architecture, dim, dim, dtype, channel, what["gradient"], what["small"])
            alike.setdefault(tile, []).append(architecture.name)
        rows += [[walk, ", ".join(names), *map(str, tile)] for tile, names in alike.items()]
    header = ["Walk", "Architectures", "Chunk", "Width", "num_warps", "num_stages"]
    return [
        "## Kernel Configuration",
        f"GPU, {dim} channels, {config.get('dtype')} (`gpu/tiles.py`; chosen by compiling, nothing is autotuned):",
        markdown(header, rows),
        "CPU core:",
        markdown(["Parameter", "Value", "Notes"], [list(row) for row in NATIVE]),
    ]


def shared_memory_budget(suite: str, inspected: list[KernelReport] | None) -> list[str]:
    """The section on shared memory: the kernel that takes most, for each architecture, as compiled."""
    if suite not in LINEAR_ATTENTION:
        return []
    heading = "## Shared-Memory Budget"
    if inspected is None:
        how = "`fulmen inspect --json kernels.json`, then `fulmen report RESULTS.json --inspection kernels.json`"
        return [
            heading,
            f"Not inspected for this report. It needs no GPU: {how}. What stands behind it: `docs/sram.md`.",
        ]
    ours = [report for report in inspected if report["role"] == "kernel"]
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
