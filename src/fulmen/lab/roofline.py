"""`fulmen roofline`: the least time that each published cell can take on its card, from bytes and FLOPs alone.

The limit of an operation reads every input and writes every result once, and makes the products of the algorithm, at
the card's peak rates; a suite's columns say how much that is. ``ours`` has instead of these bytes all that our kernels
request (:mod:`fulmen.lab.inspect.traffic`, no credit for caches), by dry run. Decays count in the inputs' dtype for the
limit, in float32 for ours. ``modelled`` is what these launches cost in the model of the card
(:mod:`fulmen.lab.cost`), one after the other: not a measurement, and without what torch itself runs beside them.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fulmen.lab.bench import suites
from fulmen.lab.bench.published import PublishedTable, tables
from fulmen.lab.bench.suite import Column, Sizes, Work
from fulmen.lab.cost.machines import MACHINES
from fulmen.lab.files import write_json
from fulmen.runtime.architectures import ARCHITECTURES
from fulmen.runtime.availability import why_triton_is_missing

if TYPE_CHECKING:
    from fulmen.lab.inspect.dry_run import Launch


class Card(NamedTuple):
    arch: str
    flops: float  # bfloat16 products added in float32, dense, per second
    bandwidth: float  # bytes of its memory per second


# NVIDIA's data sheets: "A100 Tensor Core GPU" (SXM, 80 GB), "A800" (the same but for NVLink), "H100 Tensor Core GPU"
# (SXM; the sheet's 1,979 TFLOPS are with sparsity), and "RTX Blackwell GPU Architecture" for the GeForce RTX 5090,
# whose figure is for a boost clock that cards exceed.
CARDS = {
    "A100": Card("sm_80", 312e12, 2039e9),
    "A800": Card("sm_80", 312e12, 2039e9),
    "H100": Card("sm_90", 989.4e12, 3350e9),
    "RTX 5090": Card("sm_120", 209.5e12, 1792e9),
}


@dataclass(frozen=True)
class Cell:
    """Milliseconds; ``reached`` is the limit over the published time, on the card that was measured."""

    report: str
    section: str
    title: str
    column: str
    n: int
    gpu: str
    published: float
    limit: float
    bound: str  # "memory" or "compute"
    reached: float | None
    ours: float | None
    modelled: float | None


def work(table: PublishedTable, column: str, n: int) -> Work:
    """The least that this cell's operation needs."""
    least = _column(table, column).least(Sizes.of(table.config), n)
    parts = [least[mode] for mode in _modes(table)]
    return Work(sum(part.bytes for part in parts), sum(part.flops for part in parts))


def our_launches(table: PublishedTable, column: str, n: int, card: Card) -> list[Launch] | None:
    """Of our kernels for the same operation, with the defaults; None where we have no such operation."""
    launched = _column(table, column).launched
    if launched is None or why_triton_is_missing():
        return None
    by_mode = launched(ARCHITECTURES[card.arch], Sizes.of(table.config), n)
    return [launch for mode in _modes(table) for launch in by_mode[mode]]


def our_bytes(launches: list[Launch]) -> int:
    from fulmen.lab.inspect.traffic import requested_bytes

    return requested_bytes(launches)


def modelled(launches: list[Launch], card: Card) -> float | None:
    """Milliseconds; None where one of them is not modelled."""
    from fulmen.lab.inspect.compilation import key_of
    from fulmen.lab.inspect.modelling import cost_of

    costs = [cost_of(key_of(launch, ARCHITECTURES[card.arch]), card.arch, launch) for launch in launches]
    times = [cost.time for cost in costs if not isinstance(cost, str)]
    return sum(times) if len(times) == len(costs) else None


def compile_all(wanted: list[tuple[PublishedTable, str]], gpu: str | None) -> None:
    """What the model needs of all these tables' columns, on all cores; it is kept."""
    from fulmen.lab.inspect.modelling import codes, examine
    from fulmen.lab.progress import Steps

    launches = []
    for table, column in wanted:
        card = CARDS[gpu or card_of(table.gpu)]
        if card.arch in MACHINES:
            for n, row in table.rows:
                those = our_launches(table, column, n, card) if column in row else None
                launches += [(card.arch, launch) for launch in those or []]
    with Steps(codes(launches)) as steps:
        for _ in examine(launches, os.cpu_count() or 1):
            steps.begin("compiling and modelling our kernels")


def _column(table: PublishedTable, name: str) -> Column:
    column = suites.find(table.report).column(name, table.section)
    assert column is not None  # suites have every published column
    return column


def _modes(table: PublishedTable) -> tuple[str, ...]:
    return ("fwd", "bwd") if table.mode == "both" else (table.mode,)


def seconds(least: Work, card: Card) -> float:
    return max(least.bytes / card.bandwidth, least.flops / card.flops)


def card_of(gpu: str) -> str:
    """The name in :data:`CARDS` of a GPU as a report names it."""
    return next(name for name in CARDS if name in gpu)


def cells(reports: list[str], gpu: str | None, model: bool = True) -> list[Cell]:
    """Every published time; ``gpu`` asks for the limits of another card than the one that was measured, ``model`` for
    what our kernels cost in the model of a card, which needs Triton to compile them."""
    chosen = [table for table in tables() if table.metric == "speed" and table.report in reports]
    if model:
        compile_all([(table, column) for table in chosen for column in table.columns], gpu)
    found = []
    for table in chosen:
        measured = card_of(table.gpu)
        name = gpu or measured
        card = CARDS[name]
        for n, row in table.rows:
            for column, published in row.items():
                least = work(table, column, n)
                limit = seconds(least, card) * 1e3
                launches = our_launches(table, column, n, card)
                found.append(
                    Cell(
                        table.report, table.section, table.title, column, n, name, published, limit,
                        "memory" if least.bytes / card.bandwidth >= least.flops / card.flops else "compute",
                        limit / published if name == measured else None,
                        None if launches is None else seconds(Work(our_bytes(launches), least.flops), card) * 1e3,
                        modelled(launches, card) if launches and model else None,
                    )
                )  # fmt: skip
    return found


def run(reports: list[str], gpu: str | None, into: Path | None, model: bool = True) -> None:
    """Print every cell, by table; also write JSON if asked."""
    missing = why_triton_is_missing()
    model = model and not missing
    found = cells(reports, gpu, model)
    if missing:
        print(f"what our kernels take is left out: {missing}")
    if model:
        print("ours: at best, by the bytes that our kernels request; modelled: what they cost in a model of the card")
        print("(docs/gpu_cost.md), not measured on one")
    title = None
    for cell in found:
        if (cell.title, cell.section) != title:
            title = cell.title, cell.section
            print(f"\n{cell.title}{f' ({cell.section})' if cell.section else ''}, limits of {cell.gpu} (ms):")
            header = f"{'n':>8}  {'column':14}{'published':>11}{'limit':>10}  {'bound':9}{'reached':>8}{'ours':>10}"
            print(f"{header}{'modelled':>10}")
        reached = "" if cell.reached is None else f"{cell.reached:.0%}"
        ours, model_time = ("" if value is None else f"{value:.4f}" for value in (cell.ours, cell.modelled))
        print(
            f"{cell.n:>8}  {cell.column:14}{cell.published:>11.4f}{cell.limit:>10.4f}  {cell.bound:9}{reached:>8}"
            f"{ours:>10}{model_time:>10}"
        )
    if into is not None:
        write_json(into, [asdict(cell) for cell in found])
