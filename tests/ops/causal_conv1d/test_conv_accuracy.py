"""Every backend against the specification in float64: both results and all gradients."""

import pytest
import torch

import fulmen
from cases import BACKENDS, assert_close
from fulmen.lab.operators.causal_conv1d.cases import Case, exact, run, tensors

pytestmark = pytest.mark.parametrize("backend", BACKENDS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def run_on(case, device, backend):
    return run(case, {name: x.to(device) for name, x in tensors(case).items()}, backend)


def assert_right(case, device, backend):
    results = run_on(case, device, backend)
    assert_close(results, exact(case))
    return results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dense", ["channels", "tokens", "neither"])
def test_dtypes_and_layouts(backend, device, dense, dtype):
    results = assert_right(Case(dense=dense, dtype=dtype), device, backend)
    assert results["output"].dtype == results["state"].dtype == dtype


@pytest.mark.parametrize(
    "case",
    [
        Case(width=1, state=0),
        Case(width=1, state=2),
        Case(width=2, state=None, bias=False),
        Case(width=3, activation=None),
        Case(width=8, state=9, length=11, channels=40),
        Case(width=64, state=None, length=70, channels=3),
        Case(length=0),
        Case(length=0, state=None),
        Case(length=1, state=7),  # most of the initial state is still in the final one
        Case(length=5, state=7, dense="tokens"),
        Case(channels=1),
        Case(channels=1, dense="tokens"),
        Case(channels=300, length=19),  # more than a tile has
        Case(channels=20, length=260, dense="tokens"),
    ],
)
def test_shapes(backend, device, case):
    assert_right(case, device, backend)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_convolution_of_torch(backend, device, activation, dtype):
    """Differentiated by autograd, and without anything of the specification, which the other tests compare with."""
    case = Case(length=9, state=5, activation=activation, dtype=dtype)
    given = {name: x.double() for name, x in tensors(case).items()}
    leaves = {name: x.requires_grad_() for name, x in given.items() if not name.startswith("grad")}
    u = torch.cat((leaves["initial_state"], leaves["x"].mT), 2)
    z = torch.nn.functional.conv1d(u[:, :, 2:], leaves["weight"][:, None], leaves["bias"], groups=case.channels).mT
    results = z * z.sigmoid() if activation else z, u[:, :, -5:]
    found = torch.autograd.grad(results, list(leaves.values()), (given["grad_output"], given["grad_state"]))
    gradients = {f"d{name}": x for name, x in zip(leaves, found, strict=True)}
    assert_close(run_on(case, device, backend), {"output": results[0], "state": results[1]} | gradients)


@pytest.mark.parametrize("dense", ["channels", "tokens"])
@pytest.mark.parametrize("state", [None, 5])
def test_packed_sequences(backend, device, dense, state):
    """Empty ones too, first, last and in between; those shorter than the window; one across what a segment has."""
    assert_right(Case(lengths=(0, 5, 1, 140, 0, 2, 0), dense=dense, state=state, channels=18), device, backend)


@pytest.mark.parametrize("dense", ["channels", "tokens"])
def test_packed_sequences_are_those_alone(backend, device, dense):
    """Bit for bit: nothing leaks."""
    case = Case(lengths=(3, 60, 2), dense=dense)
    given = {name: x.to(device) for name, x in tensors(case).items()}
    together = run(case, given, backend)
    for i, (first, last) in enumerate(((0, 3), (3, 63), (63, 65))):
        alone = dict(given)
        for name in ("x", "grad_output"):
            alone[name] = given[name][:, first:last]
        for name in ("initial_state", "grad_state"):
            alone[name] = given[name][i : i + 1]
        found = run(case._replace(lengths=(last - first,)), alone, backend)
        assert torch.equal(found["output"], together["output"][:, first:last])
        assert torch.equal(found["dx"], together["dx"][:, first:last])
        for name in ("state", "dinitial_state"):
            assert torch.equal(found[name], together[name][i : i + 1])


def test_a_sequence_in_two_parts(backend, device):
    """The state carries on what was."""
    given = {name: x.to(device) for name, x in tensors(Case(state=None)).items()}
    x, parameters = given["x"], (given["weight"], given["bias"])
    whole, last = fulmen.causal_conv1d(x, *parameters, return_state=True, backend=backend)
    state, parts = None, []
    for part in (x[:, :2], x[:, 2:2], x[:, 2:30], x[:, 30:]):
        y, state = fulmen.causal_conv1d(part, *parameters, initial_state=state, return_state=True, backend=backend)
        parts.append(y)
    assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(state, last)


@pytest.mark.parametrize("missing", ["output", "state"])
def test_gradients_from_one_of_the_results(backend, device, missing):
    """The other one is not used, and counts for nothing."""
    case = Case(length=3)
    given = {name: x.to(device) for name, x in tensors(case).items()}
    expected = run(case, given | {f"grad_{missing}": torch.zeros_like(given[f"grad_{missing}"])}, backend)
    leaves = {name: x.detach().requires_grad_() for name, x in given.items() if not name.startswith("grad")}
    output, state = fulmen.causal_conv1d(**leaves, activation="silu", return_state=True, backend=backend)
    chosen, grad = (state, given["grad_state"]) if missing == "output" else (output, given["grad_output"])
    found = torch.autograd.grad(chosen, list(leaves.values()), grad)
    for name, x in zip(leaves, found, strict=True):
        assert torch.equal(x, expected[f"d{name}"]), name


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "initial_state"])
def test_one_gradient_alone(backend, device, wanted):
    case = Case(length=9)
    given = {name: x.to(device) for name, x in tensors(case).items()}
    leaves = {n: x.detach().requires_grad_(n == wanted) for n, x in given.items() if not n.startswith("grad")}
    results = fulmen.causal_conv1d(**leaves, activation="silu", return_state=True, backend=backend)
    (found,) = torch.autograd.grad(results, leaves[wanted], (given["grad_output"], given["grad_state"]))
    assert torch.equal(found, run(case, given, backend)[f"d{wanted}"])


def test_parameters_of_another_dtype(backend, device):
    """Weights and bias keep the digits they have, and so do their gradients."""
    case = Case(length=9, dtype=torch.bfloat16)
    given = {name: x.to(device) for name, x in tensors(case).items()}
    for name in ("weight", "bias"):
        given[name] = given[name].float() + 1e-3
    expected = run(case, {name: x.cpu().double() for name, x in given.items()}, "reference")
    results = run(case, given, backend)
    assert results["dweight"].dtype == results["dbias"].dtype == torch.float32
    assert_close(results, expected)


def test_parameters_of_float64_do_not_widen_the_arithmetic(backend, device):
    given = {name: x.to(device) for name, x in tensors(Case(length=9)).items()}
    wide = given | {name: given[name].double() for name in ("weight", "bias")}
    expected = run(Case(), given, backend)
    for name, x in run(Case(), wide, backend).items():
        assert torch.equal(x, expected[name].to(x.dtype)), name


def test_extreme_values_do_not_become_nan(backend, device):
    x = torch.tensor([-1e4, -200.0, -90.0, 0.0, 90.0, 1e4], device=device).reshape(1, 6, 1)
    y = fulmen.causal_conv1d(x, torch.ones(1, 1, device=device), activation="silu", backend=backend)
    torch.testing.assert_close(y, torch.nn.functional.silu(x.double()).float())
