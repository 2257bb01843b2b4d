import pytest
import torch

import fulmen.distributed
from cases import assert_close
from distributed import sharded
from fulmen.lab.operators.causal_conv1d.cases import Case, cu_seqlens, tensors


def results(crew, case, lengths):
    given = {name: x.double() for name, x in tensors(case).items()}
    options = {"activation": case.activation, "cu_seqlens": cu_seqlens(case, "cpu")}
    arguments = (fulmen.distributed.causal_conv1d, given, lengths, options)
    return sharded.together(crew.run(len(lengths), sharded.run, *arguments), given)


def whole(case):
    leaves = {n: x.double().requires_grad_() for n, x in tensors(case).items() if not n.startswith("grad")}
    options = {"activation": case.activation, "cu_seqlens": cu_seqlens(case, "cpu")}
    found = fulmen.causal_conv1d(**leaves, **options, return_state=True, backend="reference")
    cotangents = [tensors(case)[f"grad_{name}"].double() for name in ("output", "state")]
    grads = torch.autograd.grad(found, list(leaves.values()), cotangents)
    return dict(zip(("output", "state"), (x.detach() for x in found), strict=True)) | {
        f"d{name}": x for name, x in zip(leaves, grads, strict=True)
    }


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
    length = 37
    for lengths in sharded.splits(length, world):
        assert_close(results(crew, case, lengths), whole(case), str(lengths))
