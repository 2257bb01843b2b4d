"""The Triton kernels in Triton's interpreter; see tests/ops/linear_attention/test_triton.py."""

import pytest
import torch

import fulmen
from cases import assert_close
from fulmen.lab.operators.causal_conv1d.cases import Case, exact, run, tensors
from fulmen.runtime.architectures import interpreted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not interpreted(), reason="Triton's interpreter must be chosen before triton is imported"),
]


@pytest.mark.parametrize(
    "case",
    [
        Case(length=13, dtype=torch.bfloat16),
        Case(dtype=torch.float16, dense="tokens"),
        Case(length=10, state=None, bias=False, width=3, activation=None, dense="neither"),
        Case(width=1, state=2, length=3),
        Case(width=6, state=7, length=7),
        Case(length=0),
        Case(length=5, state=7),
        Case(channels=140, length=3),
        Case(lengths=(0, 5, 1, 12, 0)),
        Case(lengths=(2, 0, 40), dense="tokens", state=None),
    ],
)
def test_cases(case):
    assert_close(run(case, tensors(case), "triton"), exact(case))


def test_several_segments():
    """A few channels do not fill a card: their tokens have segments."""
    case = Case(length=260, channels=3, width=2, state=None, dense="tokens")
    assert_close(run(case, tensors(case), "triton"), exact(case))


def test_tokens_after_the_last_sequence():
    """cu_seqlens may end before N on a GPU, where its values are not looked at."""
    x, weight = torch.randn(1, 30, 5, requires_grad=True), torch.randn(5, 2)
    output = fulmen.causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 3, 10]), backend="triton")
    (grad,) = torch.autograd.grad(output.sum(), x)
    for found in (output, grad):
        assert found[:, :10].all()
        assert not found[:, 10:].any()


@pytest.mark.parametrize("case", [Case(length=3, dtype=torch.bfloat16), Case(length=3, width=1, state=0, bias=False)])
def test_the_step(case):
    given, expected = tensors(case), exact(case)
    state, parameters = given["initial_state"].clone(), (given["weight"], given.get("bias"))
    outputs = [
        fulmen.causal_conv1d_step(x, state, *parameters, activation="silu", backend="triton")
        for x in given["x"].unbind(1)
    ]
    results = {"output": torch.stack(outputs, 1), "state": state}
    assert_close(results, {name: expected[name] for name in results})
