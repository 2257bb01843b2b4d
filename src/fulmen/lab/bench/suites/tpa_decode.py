"""Decoding one token with tensor-product attention (report "tpa_decode")."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

import fulmen
from fulmen.lab.bench.compiled import Compiled
from fulmen.lab.bench.suite import PUBLISHED_LENGTHS, Column, Input, Preset, Sizes, Suite
from fulmen.ops.tpa.problem import decode_of
from fulmen.ops.tpa.reference import naive
from fulmen.ops.tpa.torch_factorised import factorised

FACTORS = ("aq", "ak", "av", "bq", "bk", "bv")


def _split(split: str, backend: str = "auto") -> Callable[..., Tensor]:
    return lambda *factors: fulmen.tpa_decode(*factors, split=split, backend=backend)


def _naive(aq: Tensor, ak: Tensor, av: Tensor, bq: Tensor, bk: Tensor, bv: Tensor) -> Tensor:
    return naive(decode_of(aq, ak, av, bq, bk, bv))


def _factorised(aq: Tensor, ak: Tensor, av: Tensor, bq: Tensor, bk: Tensor, bv: Tensor) -> Tensor:
    return factorised(decode_of(aq, ak, av, bq, bk, bv))


TPA_DECODE = Suite(
    name="tpa_decode",
    about="one query of tensor-product attention over m cached keys, from their factors",
    axis="m",
    baseline="to",
    modes=("fwd",),
    sections={
        "": (
            Column("trb", 'tpa_decode, split="batch"', FACTORS, _split("batch"), _naive),
            Column("trbh", 'tpa_decode, split="head"', FACTORS, _split("head"), _naive),
            Column("trbn", 'tpa_decode, split="sequence"', FACTORS, _split("sequence"), _naive),
            Column("to", "torch on the factors", FACTORS, _factorised, _naive),
            Column("toc", "to, under torch.compile", FACTORS, Compiled(_factorised), _naive),
            Column("ton", "torch that builds q, k and v", FACTORS, _naive, _naive),
            Column("tonc", "ton, under torch.compile", FACTORS, Compiled(_naive), _naive),
        )
    },
    inputs={
        "aq": Input("B 1 H R"),
        "ak": Input("B N H"),
        "av": Input("B N H"),
        "bq": Input("B 1 R D"),
        "bk": Input("B N D"),
        "bv": Input("B N D"),
    },
    presets={
        "published": Preset((Sizes(8, 32, 128, 16), Sizes(32, 32, 128, 16)), PUBLISHED_LENGTHS),
        "laptop": Preset((Sizes(8, 32, 128, 16),), PUBLISHED_LENGTHS[:6]),
        "quick": Preset((Sizes(2, 32, 128, 16),), (256, 1024, 4096)),
    },
    check_sizes=lambda sizes: sizes,
    sizes_in_title=lambda sizes: f"batch{sizes.batch}-head{sizes.heads}-dim{sizes.dim}-rank{sizes.rank}",
)
