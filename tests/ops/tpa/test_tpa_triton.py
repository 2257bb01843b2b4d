"""The Triton kernels in Triton's interpreter, against q, k and v in float64; `make` gives them their own process."""

import pytest
import torch

import fulmen
from cases import TOLERANCE, relative_error
from fulmen.runtime.architectures import interpreted
from tpa_cases import SPLITS, Case, assert_exact, factors, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not interpreted(), reason="Triton's interpreter must be chosen before triton is imported"),
]

# Ragged, not a multiple of anything, and two slices of the splits that partition the sequence.
RAGGED = Case(batch=3, tokens=300, heads=5, key_size=20, value_size=9, lengths=(300, 0, 257), scale=0.4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("split", SPLITS)
def test_every_split_and_dtype(split, dtype):
    case = RAGGED.of(dtype=dtype)
    assert_exact(run(case, split=split, backend="triton"), case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks(dtype):
    """Above one, and for the query so many that q is formed."""
    for case in (
        Case(key_rank=3, value_rank=2, lengths=(70, 1), dtype=dtype),
        Case(batch=1, rank=70, heads=2, key_size=20, dtype=dtype),
        Case(batch=1, rank=20, heads=2, key_size=70, dtype=dtype),  # in float32 more than are multiplied at once
    ):
        assert_exact(run(case, backend="triton"), case)


@pytest.mark.parametrize("split", ["head", "sequence"])
def test_more_heads_than_a_program_has(split):
    case = Case(batch=1, tokens=280, heads=37, key_size=8, value_size=8)
    assert_exact(run(case, split=split, backend="triton"), case)


def test_scores_of_any_size():
    case = Case(tokens=300, size=1e4, lengths=(300, 33))
    assert_exact(run(case, split="sequence", backend="triton"), case)


def test_float16_scores_beyond_its_range():
    """Products of float16 factors go far beyond 65504 before the scale."""
    given = {name: x.clone() for name, x in factors(Case(dtype=torch.float16)).items()}
    given["bq"].mul_(300)
    given["bk"].mul_(300)
    output = fulmen.tpa_decode(**given, scale=1e-6, backend="triton")
    expected = fulmen.tpa_decode(**{name: x.double() for name, x in given.items()}, scale=1e-6)
    assert (given["bq"].double() @ given["bk"].double().mT).abs().max() > 65504
    assert relative_error(output, expected) <= TOLERANCE[torch.float16]
