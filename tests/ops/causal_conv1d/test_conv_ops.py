"""The custom ops: torch.compile, torch.export, opcheck, autocast, layouts of results."""

import pytest
import torch

import fulmen
from cases import BACKENDS
from fulmen.lab.operators.causal_conv1d.cases import Case, cu_seqlens, run, tensors

pytestmark = pytest.mark.one_build
BACKEND = pytest.mark.parametrize("backend", BACKENDS)
OPS = torch.ops.fulmen


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@BACKEND
@pytest.mark.parametrize(
    "case", [Case(length=7, channels=3, dense="tokens"), Case(lengths=(3, 0, 4), channels=3, state=None, bias=False)]
)
def test_opcheck(backend, device, case):
    given = {name: x.to(device).requires_grad_() for name, x in tensors(case).items()}
    bounds = cu_seqlens(case, device)
    args = (given["x"], given["weight"], given.get("bias"), "silu", given.get("initial_state"), bounds, True, backend)
    torch.library.opcheck(OPS.causal_conv1d.default, args)


@BACKEND
def test_opcheck_of_the_step(backend, device):
    x, state, weight = (torch.randn(shape, device=device) for shape in ((2, 3), (2, 3, 4), (3, 4)))
    torch.library.opcheck(OPS.causal_conv1d_step.default, (x, state, weight, None, "silu", backend))


@BACKEND
@pytest.mark.parametrize("case", [Case(), Case(lengths=(5, 0, 9))])
def test_compiled_without_graph_breaks(backend, device, case):
    """Forward and backward of the compiled function are those of the eager one, bit for bit."""
    given = {name: x.to(device) for name, x in tensors(case).items()}
    bounds = cu_seqlens(case, device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(leaves):
        return fulmen.causal_conv1d(**leaves, activation="silu", return_state=True, cu_seqlens=bounds, backend=backend)

    leaves = {name: x.detach().requires_grad_() for name, x in given.items() if not name.startswith("grad")}
    results = call(leaves)
    found = torch.autograd.grad(results, list(leaves.values()), (given["grad_output"], given["grad_state"]))
    eager = run(case, given, backend)
    assert torch.equal(results[0], eager["output"])
    assert torch.equal(results[1], eager["state"])
    for name, x in zip(leaves, found, strict=True):
        assert torch.equal(x, eager[f"d{name}"]), name


def test_a_compiled_function_takes_changing_lengths_without_recompiling_each():
    weight = torch.randn(8, 4)
    compiled = torch.compile(
        lambda x: fulmen.causal_conv1d(x, weight, return_state=True), fullgraph=True, dynamic=True, backend="eager"
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (5, 70, 131):
            x = torch.randn(2, length, 8)
            for found, expected in zip(compiled(x), fulmen.causal_conv1d(x, weight, return_state=True), strict=True):
                assert torch.equal(found, expected)


def test_a_compiled_step_updates_the_state():
    """With operations around, in a graph without mutations, as inductor gets it."""
    weight = torch.randn(8, 4)

    @torch.compile(fullgraph=True, backend="aot_eager_decomp_partition")
    def decode(x, state):
        return fulmen.causal_conv1d_step(x * 2, state, weight, activation="silu") + 1

    x, state = torch.randn(2, 8), torch.randn(2, 8, 4)
    expected_state = state.clone()
    expected = fulmen.causal_conv1d_step(x * 2, expected_state, weight, activation="silu") + 1
    torch.testing.assert_close(decode(x, state), expected)
    assert torch.equal(state, expected_state)


def test_exported_with_a_dynamic_length():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 4))

        def forward(self, x):
            return fulmen.causal_conv1d(x, self.weight, activation="silu", return_state=True)

    layer, length = Layer(), torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(layer, (torch.randn(2, 16, 8),), dynamic_shapes=({1: length},))
    x = torch.randn(2, 300, 8)
    for found, expected in zip(program.module()(x), layer(x), strict=True):
        assert torch.equal(found, expected)


@BACKEND
def test_autocast(backend, device):
    """Inputs are rounded as autocast wants it; weights and states keep what they have."""
    given = {name: x.to(device) for name, x in tensors(Case()).items()}
    x, parameters = given["x"].requires_grad_(), (given["weight"], given["bias"])
    with torch.autocast(device, torch.bfloat16):
        output = fulmen.causal_conv1d(x, *parameters, backend=backend)
        with torch.no_grad():
            token = fulmen.causal_conv1d_step(x[:, 0], given["initial_state"], *parameters, backend=backend)
    assert output.dtype == token.dtype == torch.bfloat16
    assert torch.equal(output, fulmen.causal_conv1d(x.bfloat16(), *parameters, backend=backend))
    output.sum().backward()
    assert x.grad.dtype == torch.float32


@BACKEND
@pytest.mark.parametrize("dense", ["channels", "tokens"])
def test_results_have_the_layout_of_x(backend, device, dense):
    """Also where x is a part of something wider; what follows would copy another layout."""
    case = Case(dense=dense, length=10, channels=8)
    given = {name: x.to(device) for name, x in tensors(case).items()}
    results = run(case, given, backend)
    expected = (1, 8) if dense == "tokens" else (8, 1)
    wanted = (1, 10) if dense == "tokens" else expected
    assert results["output"].stride()[1:] == results["dx"].stride()[1:] == wanted
    part = given["x"][:, :, 2:7]
    strides = fulmen.causal_conv1d(part, given["weight"][2:7], backend=backend).stride()
    assert strides[1:] == ((1, 10) if dense == "tokens" else (5, 1))


@BACKEND
def test_no_double_backward(backend, device):
    x, weight = torch.randn(1, 5, 3, device=device, requires_grad=True), torch.randn(3, 4, device=device)
    output = fulmen.causal_conv1d(x, weight, activation="silu", backend=backend)
    (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no double backward: the gradient of causal_conv1d"):
        grad.sum().backward()


def test_on_the_meta_device():
    x, weight = torch.empty(2, 100, 6, device="meta"), torch.empty(6, 4, device="meta")
    output, state = fulmen.causal_conv1d(x, weight, return_state=True, backend="torch")
    assert output.shape == x.shape
    assert state.shape == (2, 6, 3)
