"""Inputs and the float64 oracle that the tests of tensor-product attention share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

import fulmen
from fulmen.lab.operators.tpa.checks import deviations_of
from fulmen.ops.tpa.validation import SPLITS

__all__ = ["SPLITS", "Case", "assert_exact", "exact", "factors", "options", "run"]


@dataclass(frozen=True)
class Case:
    batch: int = 2
    tokens: int = 70
    heads: int = 3
    rank: int = 4
    key_size: int = 16
    value_size: int = 16
    key_rank: int | None = None  # None: factors without a dimension of rank
    value_rank: int | None = None
    scale: float | None = None
    lengths: tuple[int, ...] | None = None
    size: float = 1.0  # of the scores
    dtype: torch.dtype = torch.float32

    def of(self, **changes: object) -> Case:
        return replace(self, **changes)


@lru_cache(maxsize=32)
def factors(case: Case) -> dict[str, Tensor]:
    """The factors, in the case's dtype. Scores are of order ``case.size``; tokens after the end are NaN."""
    generator = torch.Generator().manual_seed(case.tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    key_rank = () if case.key_rank is None else (case.key_rank,)
    value_rank = () if case.value_rank is None else (case.value_rank,)
    made = {
        "aq": normal(case.batch, 1, case.heads, case.rank) * case.rank**0.5 * case.size**0.5,
        "ak": normal(case.batch, case.tokens, case.heads, *key_rank) * case.size**0.5,
        "av": normal(case.batch, case.tokens, case.heads, *value_rank),
        "bq": normal(case.batch, 1, case.rank, case.key_size),
        "bk": normal(case.batch, case.tokens, *key_rank, case.key_size),
        "bv": normal(case.batch, case.tokens, *value_rank, case.value_size),
    }
    for name in ("ak", "av", "bk", "bv"):
        for sample, length in enumerate(case.lengths or ()):
            made[name][sample, length:] = torch.nan
    return {name: x.to(case.dtype) for name, x in made.items()}


def options(case: Case) -> dict[str, object]:
    return {"scale": case.scale, "seqlens": None if case.lengths is None else torch.tensor(case.lengths)}


def run(case: Case, **chosen: object) -> Tensor:
    return fulmen.tpa_decode(**factors(case), **options(case), **chosen)


@lru_cache(maxsize=32)
def exact(case: Case) -> Tensor:
    """Built q, k and v, sample by sample without the padding, in float64."""
    given = {name: x.double() for name, x in factors(case).items()}
    if case.key_rank is None:
        given["ak"], given["bk"] = given["ak"].unsqueeze(-1), given["bk"].unsqueeze(2)
    if case.value_rank is None:
        given["av"], given["bv"] = given["av"].unsqueeze(-1), given["bv"].unsqueeze(2)
    scale = case.key_size**-0.5 if case.scale is None else case.scale
    outputs = []
    for sample in range(case.batch):
        length = case.tokens if case.lengths is None else case.lengths[sample]
        aq, bq = given["aq"][sample, 0], given["bq"][sample, 0]
        ak, av, bk, bv = (given[name][sample, :length] for name in ("ak", "av", "bk", "bv"))
        q = torch.einsum("hr,rd->hd", aq, bq) / case.rank
        k = torch.einsum("mhr,mrd->mhd", ak, bk) / (case.key_rank or 1)
        v = torch.einsum("mhr,mre->mhe", av, bv) / (case.value_rank or 1)
        weights = (scale * torch.einsum("hd,mhd->mh", q, k)).softmax(0)
        outputs.append(torch.einsum("mh,mhe->he", weights, v))
    return torch.stack(outputs)[:, None]


def assert_exact(got: Tensor, case: Case, what: str = "") -> None:
    assert got.dtype == case.dtype
    problems = deviations_of(got, exact(case), "", factors(case) | options(case))
    assert not problems, f"{what} {'; '.join(problems)}"
