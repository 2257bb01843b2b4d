"""Decoding one token with tensor-product attention (report "tpa_decode")."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import fulmen
from fulmen.lab.bench.compiled import Compiled
from fulmen.lab.bench.owners import ours, rendered, theirs
from fulmen.lab.bench.prepared import Prepared
from fulmen.lab.bench.suite import PUBLISHED_LENGTHS, Column, Input, Kernels, Preset, Sizes, Suite, Text, Work
from fulmen.ops.tpa.problem import decode_of
from fulmen.ops.tpa.reference import naive, product
from fulmen.ops.tpa.torch_factorised import factorised
from fulmen.runtime.architectures import Architecture

if TYPE_CHECKING:
    from fulmen.lab.inspect.dry_run import Launch

INPUTS = {
    "aq": Input("B 1 H R"),
    "ak": Input("B N H"),
    "av": Input("B N H"),
    "bq": Input("B 1 R D"),
    "bk": Input("B N D"),
    "bv": Input("B N D"),
}


def _split(split: str) -> Callable[..., Tensor]:
    return lambda *factors: fulmen.tpa_decode(*factors, split=split)


def _naive(aq: Tensor, ak: Tensor, av: Tensor, bq: Tensor, bk: Tensor, bv: Tensor) -> Tensor:
    return naive(decode_of(aq, ak, av, bq, bk, bv))


def _factorised(aq: Tensor, ak: Tensor, av: Tensor, bq: Tensor, bk: Tensor, bv: Tensor) -> Tensor:
    return factorised(decode_of(aq, ak, av, bq, bk, bv))


def _column(name: str, title: str, about: str, function: Callable[..., Tensor], pros: str, cons: str) -> Column:
    owner = ours if name.startswith("tr") else rendered("torch")
    return Column(name, title, about, pros, cons, tuple(INPUTS), function, _naive, _least, _launched, owner)


def _cached(heads_first: bool) -> Column:
    """Softmax attention over a usual cache: keys and values are built before, and only read."""

    def prepare(aq: Tensor, ak: Tensor, av: Tensor, bq: Tensor, bk: Tensor, bv: Tensor) -> Callable[[], Tensor]:
        p = decode_of(aq, ak, av, bq, bk, bv)
        q, *cache = (product(a, b) for a, b in ((p.aq, p.bq), (p.ak, p.bk), (p.av, p.bv)))
        k, v = (x.transpose(1, 2) for x in cache)
        if heads_first:
            k, v = k.contiguous(), v.contiguous()
        return lambda: scaled_dot_product_attention(q.transpose(1, 2), k, v).transpose(1, 2)

    layout = "[B, H, M, D]" if heads_first else "[B, M, H, D]"
    return Column(
        "SDPA" if heads_first else "SDPA-BNHD",
        "torch, usual cache" + ("" if heads_first else ", by token"),
        f"torch scaled_dot_product_attention over keys and values that were built before, cached as {layout}",
        pros="What serves models today",
        cons="A cache of 2 · M · H · D numbers, read for every token",
        takes=tuple(INPUTS),
        function=Prepared(prepare),
        exact=_naive,
        least=_least_of_cache,
        owner=theirs("torch"),
    )


def _least_of_cache(sizes: Sizes, m: int) -> dict[str, Work]:
    numbers = sizes.batch * m * sizes.heads * sizes.dim  # of k, and of v
    return {"fwd": Work(4 * numbers, 4 * numbers)}


def _least(sizes: Sizes, m: int) -> dict[str, Work]:
    """What belongs to the one query is little beside the cache, and left out."""
    heads, dim, rank = sizes.heads, sizes.dim, sizes.rank or 1
    factors = 2 * sizes.batch * m * (2 * heads + 2 * dim)
    return {"fwd": Work(factors, 2 * sizes.batch * m * (dim * rank + rank * heads + heads * dim))}


@cache
def _launched(architecture: Architecture, sizes: Sizes, m: int) -> Mapping[str, list[Launch]]:
    from fulmen.lab.operators.tpa.workloads import launched

    return {"fwd": launched(architecture, sizes.batch, m, sizes.heads, sizes.dim, sizes.rank or 1)}


def _tiles(sizes: Sizes, dtype: torch.dtype) -> dict[str, Callable[[Architecture], Any]]:
    from fulmen.ops.tpa.triton.tiles import decode_tile

    return {"Decode (width: heads)": lambda on: decode_tile(on, sizes.dim, sizes.dim, dtype, sizes.heads)}


CORE = (
    ("slice", "512 tokens", "A task of its own; merged in their order"),
    ("tokens", "64", "Scored at once"),
    ("columns", "64", "Of values packed at a time"),
)


SUITE = Suite(
    name="tpa_decode",
    about="one query of tensor-product attention over m cached keys, from their factors",
    text=Text(
        title="Tensor-Product Attention, Decoding",
        subject="One query token over a cache of M keys and values that are kept as factors.",
        algorithm="Tensor-Product Attention",
        formula="scores = (bk · bqᵀ) · aqᵀ ⊙ ak;  p = softmax(scores);  o = bvᵀ · (p ⊙ av)",
        complexity=(
            "Factorised: O(M · R · (D + H)) for each sample; keys and values are never built",
            "Naive: O(M · H · D) to build and read keys and values of every head",
            "Memory: the factors alone, M · (2 H + D + E) numbers, against 2 · M · H · D",
        ),
    ),
    axis="m",
    baseline="to",
    modes=("fwd",),
    sections={
        "": (
            _column(
                "trb",
                "Fulmen, split by sample",
                'tpa_decode, split="batch"',
                _split("batch"),
                pros="Factors are read once for all heads",
                cons="Few programs",
            ),
            _column(
                "trbh",
                "Fulmen, split by head",
                'tpa_decode, split="head"',
                _split("head"),
                pros="Many programs",
                cons="Every head reads bk and bv",
            ),
            _column(
                "trbn",
                "Fulmen, split by sequence",
                'tpa_decode, split="sequence"',
                _split("sequence"),
                pros="Fills the machine at any batch",
                cons="A second pass to merge",
            ),
            _column(
                "to",
                "torch on the factors",
                "torch on the factors",
                _factorised,
                pros="No kernel needed",
                cons="Scores go through memory",
            ),
            _column(
                "toc",
                "torch on the factors, compiled",
                "to, under torch.compile",
                Compiled(_factorised),
                pros="Fewer passes over memory than to",
                cons="Compilation",
            ),
            _column(
                "ton",
                "torch, keys built",
                "torch that builds q, k and v",
                _naive,
                pros="Simplest",
                cons="Builds k and v of every head",
            ),
            _column(
                "tonc",
                "torch, keys built, compiled",
                "ton, under torch.compile",
                Compiled(_naive),
                pros="Fewer passes over memory than ton",
                cons="Compilation; builds k and v of every head",
            ),
            # Not published: what else a user has.
            _cached(heads_first=True),
            _cached(heads_first=False),
        )
    },
    inputs=INPUTS,
    presets={
        "published": Preset((Sizes(8, 32, 128, 16), Sizes(32, 32, 128, 16)), PUBLISHED_LENGTHS),
        "laptop": Preset((Sizes(8, 32, 128, 16),), PUBLISHED_LENGTHS[:6]),
        "quick": Preset((Sizes(2, 32, 128, 16),), (256, 1024, 4096)),
    },
    kernels=Kernels("tpa_decode", _tiles, CORE),
    one_token=lambda section: True,
    memory_columns=("trb", "trbh", "trbn", "to", "toc", "ton", "tonc"),  # a cache that was built before is not seen
    sizes_in_title=lambda sizes: f"batch{sizes.batch}-head{sizes.heads}-dim{sizes.dim}-rank{sizes.rank}",
)
