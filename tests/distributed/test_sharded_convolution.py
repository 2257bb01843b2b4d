import pytest
import torch

import fulmen.distributed
from cases import assert_close
from distributed import sharded
from fulmen.lab.operators.causal_conv1d.cases import Case, cu_seqlens, run, tensors


def results(crew, case, lengths, given):
    options = {"activation": case.activation, "cu_seqlens": cu_seqlens(case, "cpu")}
    arguments = (fulmen.distributed.causal_conv1d, given, lengths, options)
    return sharded.together(crew.run(len(lengths), sharded.run, *arguments), given)


def exact(case, given):
    return run(case, {name: x.double() for name, x in given.items()}, "reference")


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(state=None, activation=None, bias=False),
        Case(width=9, state=11),
        Case(width=1, state=0),
        Case(width=1, state=None),
        Case(dense="tokens", width=2),
        Case(lengths=(4, 0, 20, 1, 1, 11, 0), width=5, state=7),
        Case(lengths=(30, 7), width=9, state=None),
    ],
    ids=["silu", "plain", "wide", "K = 1", "K = 1, no state", "transposed", "packed", "packed, wide"],
)
def test_halo(crew, case, world):
    """Also where shards are shorter than the halo, which then lies on several ranks."""
    given = tensors(case._replace(dtype=torch.float64))
    for lengths in sharded.splits(37, world):
        assert_close(results(crew, case, lengths, given), exact(case, given), str(lengths))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("packed", [None, (4, 0, 20, 1, 1, 11, 0)], ids=["whole", "packed"])
def test_other_dtypes(crew, dtype, packed):
    """On the backend that trains: float64 has none in the core. Not of 16 bits: gradients whose parts the ranks round
    before they are summed."""
    case = Case(lengths=packed, width=5, state=7, dtype=dtype)
    given, names = tensors(case), None
    if dtype != torch.float32:
        given["grad_state"] = torch.zeros_like(given["grad_state"])
        names = {"output", "state", "dx", "dinitial_state"}
    for lengths in sharded.splits(37, 3):
        found, expected = results(crew, case, lengths, given), exact(case, given)
        assert_close(found, {name: x for name, x in expected.items() if names is None or name in names}, str(lengths))
