"""Decoding token by token."""

import pytest
import torch

import fulmen
from cases import BACKENDS, TOLERANCE, relative_error
from fulmen.lab.operators.causal_conv1d.cases import Case, exact, tensors

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def given_on(case, device):
    return {name: x.to(device) for name, x in tensors(case).items()}


def steps(given, state, case, backend):
    """The outputs, one after the other, with ``state`` rolled in place."""
    parameters = given["weight"], given.get("bias")
    return [
        fulmen.causal_conv1d_step(x, state, *parameters, activation=case.activation, backend=backend)
        for x in given["x"].unbind(1)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "case",
    [
        Case(length=6, channels=300),  # as models have it
        Case(length=6, channels=37, state=3),
        Case(length=4, channels=50, width=3, state=6, bias=False, activation=None),
        Case(length=3, width=1, state=0),
        Case(length=3, width=9, state=20),
    ],
)
def test_steps_equal_the_whole(backend, device, case, dtype):
    case = case._replace(dtype=dtype)
    given, expected = given_on(case, device), exact(case)
    state = given["initial_state"].clone()
    for t, output in enumerate(steps(given, state, case, backend)):
        assert output.dtype == dtype
        assert relative_error(output, expected["output"][:, t]) <= TOLERANCE[dtype]
    assert torch.equal(state.double().cpu(), expected["state"])


@pytest.mark.parametrize("shape", [(0, 40), (2, 40)])
@pytest.mark.parametrize("mixed", [torch.float32, torch.bfloat16])
def test_a_state_in_the_middle_of_memory(backend, device, shape, mixed):
    """Of any strides, and of another dtype than x: what is around it stays."""
    batch, channels = shape
    memory = torch.full((5, channels + 3, batch + 1), torch.nan, dtype=mixed, device=device)
    state = memory[:4, 1 : channels + 1, :batch].permute(2, 1, 0)
    state.copy_(torch.randn(batch, channels, 4, device=device))
    expected = state.clone().contiguous()
    x, weight = (torch.randn(n, channels, device=device) for n in (batch, 4))
    output = fulmen.causal_conv1d_step(x, state, weight.T, activation="silu", backend=backend)
    again = fulmen.causal_conv1d_step(x, expected, weight.T.contiguous(), activation="silu", backend=backend)
    assert torch.equal(output, again)
    assert torch.equal(state, expected)
    assert torch.equal(state[:, :, -1], x.to(mixed))
    assert memory.isnan().sum() == memory.numel() - state.numel()


def test_a_state_that_was_saved_for_a_backward_is_missed_there(backend, device):
    case = Case(length=1)
    given = given_on(case, device)
    state = given["initial_state"].clone()
    loss = (torch.ones_like(state).requires_grad_() * state).sum()
    steps(given, state, case, backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_state_made_in_inference_mode(backend, device):
    with torch.inference_mode():
        state = torch.zeros(2, 21, 4, device=device)
        steps(given_on(Case(length=1), device), state, Case(), backend)
        assert state.any()


def test_a_refused_call_leaves_the_state_as_it_was(backend, device):
    case = Case(length=1)
    given = given_on(case, device)
    state = given["initial_state"].clone()
    with pytest.raises(ValueError, match=r"weight must have shape \[C, K\] with C = 21; got \[20, 4\]"):
        steps(given | {"weight": given["weight"][:20]}, state, case, backend)
    with pytest.raises(ValueError, match="weight must not require grad: causal_conv1d_step updates the state in place"):
        steps(given | {"weight": given["weight"].requires_grad_()}, state, case, backend)
    assert torch.equal(state, given["initial_state"])
    with torch.no_grad():
        assert not steps(given, state, case, backend)[0].requires_grad
