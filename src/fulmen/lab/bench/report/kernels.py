"""The kernels behind a suite: their tiles, and what they take of an architecture's shared memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fulmen.lab.bench.report.groups import Group
from fulmen.lab.bench.tables import markdown
from fulmen.ops.chunks.decay_form import DecayForm, Decays
from fulmen.ops.linear_attention.triton.tiles import scan_tile
from fulmen.ops.output_gate.triton.tiles import ProductTile, rows_tile, sum_tile
from fulmen.ops.tpa.triton.tiles import decode_tile
from fulmen.runtime.architectures import ARCHITECTURES, Architecture
from fulmen.triton_common.tiles import Tile

KernelReport = dict[str, Any]  # one kernel, as `fulmen inspect --json` writes it
LINEAR_ATTENTION = ("state", "lasd", "la3")
# How the labels of the other suites' kernels begin.
PREFIXES = {"tpa_decode": "tpa ", "flao": "gate "}
AnyTile = Tile | ProductTile
FIELDS = {
    "chunk": "Chunk",
    "depth": "Depth",
    "width": "Width",
    "warps": "num_warps",
    "slices": "Slices",
    "registers": "maxnreg",
    "stages": "num_stages",
}
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
    config = groups[0].any_table.config
    rows: list[list[str]] = []
    fields: tuple[str, ...] = ()
    for kernel, tile_on in _tiles(suite, config).items():
        alike: dict[AnyTile, list[str]] = {}
        for architecture in ARCHITECTURES.values():
            alike.setdefault(tile_on(architecture), []).append(architecture.name)
        for tile, names in alike.items():
            rows.append([kernel, ", ".join(names), *("" if value is None else str(value) for value in tile)])
            fields = tile._fields
    about = (
        f"GPU, {config['dim']} channels, {config['dtype']}: from the table of tiles (`gpu/tiles.py`), not autotuned."
    )
    header = ["Kernel", "Architectures", *(FIELDS[field] for field in fields)]
    sections = ["## Kernel Configuration", about, markdown(header, rows)]
    if suite in LINEAR_ATTENTION:
        sections += ["CPU core:", markdown(["Parameter", "Value", "Notes"], [list(row) for row in NATIVE])]
    return sections


def _tiles(suite: str, config: dict[str, Any]) -> dict[str, Callable[[Architecture], AnyTile]]:
    """A suite's kernels, and the tile that each has on an architecture."""
    dim, dtype = config.get("dim", 128), DTYPES.get(config.get("dtype", ""), torch.bfloat16)

    decays = Decays(DecayForm.CHANNEL if suite == "state" else DecayForm.HEAD)

    def walk(gradient: bool, small: bool) -> Callable[[Architecture], Tile]:
        return lambda architecture: scan_tile(architecture, dim, dim, dtype, decays, gradient, small)

    if suite == "state":
        return {"Chunk states": walk(False, False)}
    if suite in LINEAR_ATTENTION:
        return {
            "Forward": walk(False, False),
            "Backward, with a decay's gradient": walk(True, False),
            'Backward of schedule="recompute"': walk(False, True),
        }
    if suite == "tpa_decode":
        heads = config.get("heads", 32)
        return {"Decode (width: heads)": lambda architecture: decode_tile(architecture, dim, dim, dtype, heads)}
    return {
        "Sum of outer products: kv": lambda architecture: sum_tile(dim, dim, dtype, gated=False),
        "The same of gated rows: dkv": lambda architecture: sum_tile(dim, dim, dtype, gated=True),
        "Rows times a matrix: o, dq, dk, dv, dg": lambda architecture: rows_tile(dim, dim, dtype),
    }


def _is_of(suite: str, report: KernelReport) -> bool:
    """Whether an inspected kernel is one of ours that the suite runs."""
    if report["role"] != "kernel":
        return False
    if suite in PREFIXES:
        return bool(report["kernel"].startswith(PREFIXES[suite]))
    return not report["kernel"].startswith(tuple(PREFIXES.values()))


def shared_memory_budget(suite: str, inspected: list[KernelReport] | None) -> list[str]:
    """The section on shared memory: the kernel that takes most, for each architecture, as compiled."""
    heading = "## Shared-Memory Budget"
    if inspected is None:
        how = "`fulmen inspect --json kernels.json`, then `fulmen report RESULTS.json --inspection kernels.json`"
        return [
            heading,
            f"Not inspected for this report. It needs no GPU: {how}. What stands behind it: `docs/sram.md`.",
        ]
    ours = [report for report in inspected if _is_of(suite, report)]
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
