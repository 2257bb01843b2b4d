"""tpa_decode against its specification in float64, and against itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fulmen
from fulmen.lab.precision import GPU_STYLE, OURS, TORCH, Comparison
from fulmen.lab.tolerances import Results, deviations
from fulmen.lab.verify.check import DTYPES, Check, Target, unusual
from fulmen.lab.yardstick import rounded_products
from fulmen.ops.tpa.problem import decode_of
from fulmen.ops.tpa.reference import naive
from fulmen.ops.tpa.validation import SPLITS


class Case(NamedTuple):
    tokens: int = 67
    heads: int = 3
    ranks: tuple[int, int, int] = (5, 1, 1)  # of queries, keys and values
    key_size: int = 20
    value_size: int = 9
    lengths: tuple[int, int] | None = None  # None: all tokens of both samples
    size: float = 1.0  # of the scores, about
    dtype: torch.dtype = torch.float32
    seed: int = 0  # of all values


def checks(target: Target) -> Iterator[Check]:
    for case in cases(target):
        for split in SPLITS:
            yield Check("tpa_decode", f"{unusual(case)}, split {split}", partial(decode, target, case, split))
    yield Check("tpa_decode", "the same bits twice", partial(twice, target, Case(dtype=torch.bfloat16)))


def cases(target: Target) -> Iterator[Case]:
    if target.quick:
        yield Case(lengths=(0, 40))
        return
    for dtype in DTYPES:
        yield Case(dtype=dtype)
        yield Case(lengths=(0, 40), ranks=(5, 2, 3), dtype=dtype)
    yield from (Case(tokens=tokens) for tokens in (1, 64, 130))
    yield Case(size=1e4)
    if target.device == "cuda" or target.backend == "native":
        yield Case(tokens=5000, heads=32, ranks=(16, 1, 1), key_size=128, value_size=128, dtype=torch.bfloat16)


def factors(case: Case) -> dict[str, Any]:
    """The arguments of a call, made on the CPU; what is after the end of a sample is NaN."""
    generator = torch.Generator().manual_seed(case.tokens + 1_000_000 * case.seed)
    rank, key_rank, value_rank = case.ranks

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator, device="cpu").to(case.dtype)

    def past(*shape: int) -> Tensor:
        made = normal(case.tokens, *shape)
        for row, length in zip(made, case.lengths or (), strict=False):
            row[length:] = torch.nan
        return made

    return {
        "aq": normal(1, case.heads, rank) * case.size,
        "ak": past(case.heads, key_rank),
        "av": past(case.heads, value_rank),
        "bq": normal(1, rank, case.key_size),
        "bk": past(key_rank, case.key_size),
        "bv": past(value_rank, case.value_size),
        "seqlens": None if case.lengths is None else torch.tensor(case.lengths, device="cpu"),
    }


def decode(target: Target, case: Case, split: str) -> list[str]:
    given = factors(case)
    return deviations_of(run(target, given, split), exact(given), target.backend, given)


def exact(given: dict[str, Any]) -> Tensor:
    doubles: dict[str, Any] = {name: x if name == "seqlens" else x.double() for name, x in given.items()}
    return fulmen.tpa_decode(**doubles, backend="reference")


def deviations_of(
    output: Tensor,
    expected: Tensor,
    backend: str,
    given: dict[str, Any],
    nearby: Callable[[], Sequence[Results]] = tuple,
) -> list[str]:
    """What is wrong with the output of a call."""
    return deviations(
        of_one_head(output),
        of_one_head(expected),
        backend,
        yardstick=lambda: of_one_head(yardstick(given)),
        nearby=lambda: [of_one_head(x["output"]) for x in nearby()],
    )


def of_one_head(x: Tensor) -> Results:
    """The heads of a sample are one for the bounds: a head's own result is a single row, too short to judge the
    rounding of its factors."""
    return {"output": x.flatten(2).unsqueeze(2)}


@rounded_products()
def yardstick(given: dict[str, Any]) -> Tensor:
    """The output, where bk bqᵀ and the weights of the values are rounded."""
    return fulmen.tpa_decode(**given, backend="torch")


def twice(target: Target, case: Case) -> list[str]:
    first, second = (run(target, factors(case), "auto") for _ in range(2))
    return [] if torch.equal(first, second) else ["the output differs from call to call"]


def run(target: Target, given: dict[str, Any], split: str) -> Tensor:
    moved: dict[str, Any] = {name: x if x is None else x.to(target.device) for name, x in given.items()}
    return fulmen.tpa_decode(**moved, split=split, backend=target.backend)


def comparisons(target: Target) -> Iterator[Comparison]:
    tokens, heads = (80, 4) if target.quick else (4096, 32)
    given = factors(Case(tokens, heads, ranks=(16, 1, 1), key_size=128, value_size=128, dtype=torch.bfloat16))
    found = {
        OURS: run(target, given, "auto"),
        GPU_STYLE: yardstick(given),
        TORCH: naive(decode_of(*(x for name, x in given.items() if name != "seqlens"))),
    }
    yield Comparison("tpa_decode", of_one_head(exact(given)), {name: of_one_head(x) for name, x in found.items()})
