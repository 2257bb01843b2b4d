"""Example data: made-up results in the shape of a real run, for the tests of reports. Measured nowhere."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from fulmen.lab.bench import suites
from fulmen.lab.bench.owners import Owner
from fulmen.lab.bench.published import tables as published_tables
from fulmen.lab.bench.results import Cell, Results, Table

SKIPPED = {
    "FlashAttn-2": "flash_attn is not installed: pip install flash-attn (needs CUDA)",
    "tonc": "predicted to need 33.0 GiB, and 7.6 GiB are free",
}
ENVIRONMENT: dict[str, Any] = {
    "fulmen": "0.1.0",
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "system": "Linux x86_64",
    "cpu": {"model": "Example CPU", "cores": 2, "threads": 2, "isa": "avx512"},
    "gpus": [],
    "backends": {
        "native": {"available": True, "reason": "", "devices": ["cpu"], "dtypes": ["float32"], "auto": "by head"},
        "triton": {
            "available": False,
            "reason": "torch finds no CUDA or HIP device",
            "devices": [],
            "dtypes": [],
            "auto": "",
        },
    },
}


def example_results(lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)) -> Results:
    """The published tables at other sizes: slower by a factor, with noise, some cells skipped, and errors."""
    noise = random.Random(0)
    tables = [measured(table, lengths, noise) for table in published_tables() if wanted(table)]
    options = {"device": "cpu", "dtype": "fp32", "preset": "quick", "threads": 2}
    return Results(ENVIRONMENT, options, "2026-01-31T12:00:00+00:00", "2026-01-31T12:04:30+00:00", tables)


def wanted(table: Any) -> bool:
    return table.metric != "speedup" and table.mode != "both"


def measured(published: Any, lengths: tuple[int, ...], noise: random.Random) -> Table:
    cells = []
    for n, row in published.rows:
        for column, value in row.items():
            if n in lengths:
                cells.append(cell(published, n, column, value, noise))
    title = published.title.replace("bf16", "fp32")
    about = (published.report, title, published.section, published.metric, published.mode, published.axis)
    config = published.config | {"dtype": "fp32"}
    suite, errors = suites.find(published.report), {}
    if published.metric == "speed":
        errors = {name: noise.uniform(1e-7, 9e-7) for name in published.columns if name not in SKIPPED}
    owners = {name: owner(suite.column(name, published.section)) for name in published.columns}
    checked = "n = 131, batch 2, heads 2, dim 128"
    return Table(*about, list(published.columns), suite.baseline, config, cells, errors, checked, owners)


def owner(column: Any) -> Owner:
    return replace(column.owner("cpu"), version="1.2.3")


def cell(published: Any, n: int, column: str, value: float, noise: random.Random) -> Cell:
    if column in SKIPPED:
        return Cell(n, column, skipped=SKIPPED[column])
    if column == "LASD_R" and n > 2048:
        return Cell(n, column, skipped="predicted to take 41 s, more than its share of the budget")
    if published.metric == "memory":
        return Cell(n, column, value, inputs=value * 0.6, outputs=value * 0.2, workspace=value * 0.2)
    slower = value * 40 * noise.uniform(0.9, 1.1)
    sittings = [slower, slower * 1.05]
    return Cell(n, column, slower, slower * 0.97, slower * 1.06, sittings, first_call=slower * 3)
