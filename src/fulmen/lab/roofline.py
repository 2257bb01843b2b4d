"""`fulmen roofline`: the least time that each published cell can take on its card, from bytes and FLOPs alone.

The limit of an operation reads every input and writes every result once, and makes the products of the recurrence, at
the card's peak rates. ``ours`` has instead of these bytes all that our kernels request (:mod:`fulmen.lab.inspect.traffic`, no
credit for caches), by dry run. Decays count in the inputs' dtype for the limit, in float32 for ours.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fulmen.runtime.architectures import ARCHITECTURES
from fulmen.runtime.availability import why_triton_is_missing

if TYPE_CHECKING:
    from fulmen.lab.bench.published import PublishedTable


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
# What the columns of linear attention compute, as the decay of fulmen's own operators; softmax attention has none.
DECAY_OF = {
    "lasd": {
        "LASD_R": "head", "LASD_P": "head", "LAND_P": "none", "LASD_PL": "learnable head", "LASD3_P": "token",
        "LP": "head", "LC": "head", "GLA_K": "channel", "GLA_S_K": "token",
    },
    "la3": {"LA3-Chunked": "none", "LA3-NoDecay": "none", "LA3-Original": "head"},
    "state": {"GLA": "channel", "LAVD_K": "channel", "LAVD_KV": "channel+value", "LAVD_K_P": "channel", "LAVD_KV_P": "channel+value"},
}  # fmt: skip
CHUNK = 128  # of the state report
KEPT = {"no cache": 0, "cache": 1, "cache kv, qkv": 2}  # of the forward, by the section of the flao report


class Work(NamedTuple):
    bytes: float
    flops: float

    def seconds(self, card: Card) -> float:
        return max(self.bytes / card.bandwidth, self.flops / card.flops)


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


def work(table: PublishedTable, column: str, n: int) -> Work:
    """The least that this cell's operation needs."""
    modes = ("fwd", "bwd") if table.mode == "both" else (table.mode,)
    parts = [_work(table, column, n, mode == "bwd") for mode in modes]
    return Work(sum(part.bytes for part in parts), sum(part.flops for part in parts))


def _work(table: PublishedTable, column: str, n: int, backward: bool) -> Work:
    batch, heads, dim = (table.config[name] for name in ("batch", "heads", "dim"))
    rows, tensor = batch * heads * n, batch * heads * n * dim * 2
    product = 2 * rows * dim * dim  # of each token with a state
    if table.report == "tpa_decode":
        rank = table.config["rank"]
        return Work(2 * batch * n * (2 * heads + 2 * dim), 2 * batch * n * (dim * rank + rank * heads + heads * dim))
    if table.report == "flao":
        # Without what is kept of the forward, k^T v and q (k^T v) are computed again.
        kept = KEPT[table.section]
        if not backward:
            return Work(5 * tensor, 2 * product)
        return Work((9 + (kept == 2)) * tensor, (6 - kept) * product)
    decay = DECAY_OF[table.report].get(column)
    if decay is None:  # causal softmax attention
        return Work((8 if backward else 4) * tensor, (5 if backward else 2) * rows * n * dim)
    of_decay = {"token": 2 * rows, "channel": tensor, "channel+value": 2 * tensor}.get(decay, 0)
    if table.report == "state":
        return Work(2 * tensor + of_decay + batch * heads * (n // CHUNK + 1) * dim * dim * 2, product)
    if backward:
        return Work(7 * tensor + 2 * of_decay, 5 * product)
    return Work(4 * tensor + of_decay, 2 * product)


def our_bytes(table: PublishedTable, column: str, n: int, card: Card) -> int | None:
    """What our kernels request for the same operation, with the defaults; None where we have no such operation."""
    if why_triton_is_missing():
        return None
    sizes = tuple(table.config[name] for name in ("batch", "heads", "dim"))
    if table.report == "tpa_decode":
        return _requested_by_tpa(card.arch, *sizes, table.config["rank"], n)
    if table.report == "flao":
        forward, backward = _requested_by_gate(card.arch, *sizes, n, KEPT[table.section])
    elif decay := DECAY_OF[table.report].get(column):
        forward, backward = _requested(card.arch, decay, *sizes, n, table.report == "state")
    else:
        return None
    return {"fwd": forward, "bwd": backward, "both": forward + backward}[table.mode]


@cache
def _requested(arch: str, decay: str, batch: int, heads: int, dim: int, length: int, states: bool) -> tuple[int, int]:
    from fulmen.lab.inspect.inspection import DECAYS
    from fulmen.lab.operators.linear_attention.workloads import attention_traffic, states_traffic

    if states:
        return states_traffic(ARCHITECTURES[arch], DECAYS[decay], batch, length, heads, dim), 0
    return attention_traffic(ARCHITECTURES[arch], DECAYS[decay], "auto", decay != "head", batch, length, heads, dim)


@cache
def _requested_by_tpa(arch: str, batch: int, heads: int, dim: int, rank: int, tokens: int) -> int:
    from fulmen.lab.operators.tpa.workloads import traffic

    return traffic(ARCHITECTURES[arch], batch, tokens, heads, dim, rank)


@cache
def _requested_by_gate(arch: str, batch: int, heads: int, dim: int, length: int, kept: int) -> tuple[int, int]:
    from fulmen.lab.operators.output_gate.workloads import traffic

    return traffic(ARCHITECTURES[arch], batch, length, heads, dim, keep_kv=kept >= 1, keep_qkv=kept >= 2)


def card_of(gpu: str) -> str:
    """The name in :data:`CARDS` of a GPU as a report names it."""
    return next(name for name in CARDS if name in gpu)


def cells(reports: list[str], gpu: str | None) -> list[Cell]:
    """Every published time; ``gpu`` asks for the limits of another card than the one that was measured."""
    from fulmen.lab.bench.published import tables

    found = []
    for table in tables():
        if table.metric != "speed" or table.report not in reports:
            continue
        measured = card_of(table.gpu)
        name = gpu or measured
        card = CARDS[name]
        for n, row in table.rows:
            for column, published in row.items():
                least = work(table, column, n)
                limit = least.seconds(card) * 1e3
                requested = our_bytes(table, column, n, card)
                found.append(
                    Cell(
                        table.report, table.section, table.title, column, n, name, published, limit,
                        "memory" if least.bytes / card.bandwidth >= least.flops / card.flops else "compute",
                        limit / published if name == measured else None,
                        None if requested is None else Work(requested, least.flops).seconds(card) * 1e3,
                    )
                )  # fmt: skip
    return found


def run(reports: list[str], gpu: str | None, into: Path | None) -> None:
    """Print every cell, by table; also write JSON if asked."""
    found = cells(reports, gpu)
    title = None
    for cell in found:
        if (cell.title, cell.section) != title:
            title = cell.title, cell.section
            print(f"\n{cell.title}{f' ({cell.section})' if cell.section else ''}, limits of {cell.gpu} (ms):")
            print(f"{'n':>8}  {'column':14}{'published':>11}{'limit':>10}  {'bound':9}{'reached':>8}{'ours':>10}")
        reached = "" if cell.reached is None else f"{cell.reached:.0%}"
        ours = "" if cell.ours is None else f"{cell.ours:.4f}"
        print(
            f"{cell.n:>8}  {cell.column:14}{cell.published:>11.4f}{cell.limit:>10.4f}  {cell.bound:9}{reached:>8}"
            f"{ours:>10}"
        )
    if into is not None:
        into.write_text(json.dumps([asdict(cell) for cell in found], indent=1))
