"""Decoding one token with tensor-product attention (report "tpa_decode")."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

import fulmen
from fulmen.bench.compiled import Compiled
from fulmen.bench.suite import PUBLISHED_LENGTHS, Column, Preset, Sizes, Suite, normal

FACTORS = ("aq", "ak", "av", "bq", "bk", "bv")
LENGTHS = PUBLISHED_LENGTHS


def _split(split: str, backend: str = "auto") -> Callable[..., Tensor]:
    return lambda *factors: fulmen.tpa_decode(*factors, split=split, backend=backend)


def naive(aq: Tensor, ak: Tensor, av: Tensor, bq: Tensor, bk: Tensor, bv: Tensor) -> Tensor:
    """Builds q, k and v: ``[B, 1, H, E]``."""
    q = (aq @ bq) / aq.shape[-1]
    k, v = ak[..., None] * bk[:, :, None], av[..., None] * bv[:, :, None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    p = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    return (p @ v).transpose(1, 2)


def factorised(aq: Tensor, ak: Tensor, av: Tensor, bq: Tensor, bk: Tensor, bv: Tensor) -> Tensor:
    """Never builds k or v: ``[B, 1, H, E]``."""
    rank, dim = bq.shape[-2:]
    scores = (aq[:, 0] @ (bq[:, 0] @ bk.mT)) * ak.mT
    p = (scores * (dim**-0.5 / rank)).softmax(-1)
    return ((p * av.mT) @ bv)[:, None]


_EXACT = naive
TPA_DECODE = Suite(
    name="tpa_decode",
    about="one query of tensor-product attention over m cached keys, from their factors",
    axis="m",
    baseline="to",
    modes=("fwd",),
    sections={
        "": (
            Column("trb", 'tpa_decode, split="batch"', FACTORS, _split("batch"), _EXACT),
            Column("trbh", 'tpa_decode, split="head"', FACTORS, _split("head"), _EXACT),
            Column("trbn", 'tpa_decode, split="sequence"', FACTORS, _split("sequence"), _EXACT),
            Column("to", "torch on the factors", FACTORS, factorised, _EXACT),
            Column("toc", "to, under torch.compile", FACTORS, Compiled(factorised), _EXACT),
            Column("ton", "torch that builds q, k and v", FACTORS, naive, _EXACT),
            Column("tonc", "ton, under torch.compile", FACTORS, Compiled(naive), _EXACT),
        )
    },
    inputs={
        "aq": normal("B 1 H R"),
        "ak": normal("B N H"),
        "av": normal("B N H"),
        "bq": normal("B 1 R D"),
        "bk": normal("B N D"),
        "bv": normal("B N D"),
    },
    presets={
        "published": Preset((Sizes(8, 32, 128, 16), Sizes(32, 32, 128, 16)), PUBLISHED_LENGTHS),
        "laptop": Preset((Sizes(8, 32, 128, 16),), PUBLISHED_LENGTHS[:6]),
        "quick": Preset((Sizes(2, 32, 128, 16),), (256, 1024, 4096)),
    },
    check_sizes=lambda sizes: sizes,
    sizes_in_title=lambda sizes: f"batch{sizes.batch}-head{sizes.heads}-dim{sizes.dim}-rank{sizes.rank}",
)
