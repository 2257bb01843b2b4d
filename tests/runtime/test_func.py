"""torch.func on the differentiable operators: the gradients of plain autograd, and refusals where there are none."""

import pytest
import torch
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap

import fulmen
from cases import BACKENDS

OPERATORS = {
    "linear_attention": lambda q, k, v, backend: fulmen.linear_attention(
        q, k, v, log_decay=-(v[0, 0, :, 0] ** 2), backend=backend
    ),
    "chunk_states": lambda q, k, v, backend: fulmen.chunk_states(q * k, v, chunk_size=2, backend=backend),
    "causal_conv1d": lambda q, k, v, backend: fulmen.causal_conv1d(
        (q * k).flatten(2), v[0, :2].flatten(1).T, activation="silu", backend=backend
    ),
    "output_gated_attention": lambda q, k, v, backend: fulmen.output_gated_attention(q, k, v, v, backend=backend),
}
pytestmark = [
    pytest.mark.parametrize("operator", OPERATORS),
    pytest.mark.parametrize("backend", BACKENDS),
    pytest.mark.filterwarnings("error:There is a performance drop"),
]


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    return tuple(torch.randn(1, 5, 2, 3) for _ in range(3))


@pytest.fixture
def function(operator, backend):
    """Not linear in any of its arguments."""
    return lambda q, k, v: OPERATORS[operator](q, k, v, backend).square()


@pytest.fixture
def expected(function, inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves).sum(), leaves)


def assert_equal(found, expected):
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)


def test_grad(function, inputs, expected):
    assert_equal(grad(lambda *x: function(*x).sum(), (0, 1, 2))(*inputs), expected)


def test_grad_inside_of_compiled_code(function, inputs, expected):
    torch.compiler.reset()  # each operator and backend compiles again; there is a limit
    compiled = torch.compile(grad(lambda *x: function(*x).sum(), (0, 1, 2)), fullgraph=True, backend="aot_eager")
    assert_equal(compiled(*inputs), expected)


def test_vjp(function, inputs, expected):
    output, pull = vjp(function, *inputs)
    assert torch.equal(output, function(*inputs))
    assert_equal(pull(torch.ones_like(output)), expected)


def test_jacrev(function, inputs, expected):
    jacobians = jacrev(lambda *x: function(*x).flatten(), (0, 1, 2))(*inputs)
    for jacobian, want in zip(jacobians, expected, strict=True):
        torch.testing.assert_close(jacobian.sum(0), want)


def test_gradients_per_sample(function, inputs, expected):
    samples = [torch.stack((x, 2 * x)) for x in inputs]
    found = vmap(grad(lambda *x: function(*x).sum(), (0, 1, 2)))(*samples)
    assert_equal([x[0] for x in found], expected)


def test_no_second_derivative_is_lost(operator, backend, function, inputs):
    def loss(q):
        return function(q, *inputs[1:]).square().sum()

    if (operator, backend) == ("output_gated_attention", "reference"):  # plain torch operations have one
        assert grad(lambda q: grad(loss)(q).square().sum())(inputs[0]).any()
        return
    with pytest.raises(RuntimeError, match=f"no double backward: the gradient of {operator}"):
        grad(lambda q: grad(loss)(q).square().sum())(inputs[0])
    for forward_mode in (hessian(loss), lambda q: jvp(grad(loss), (q,), (q,)), lambda q: jvp(loss, (q,), (q,))):
        with pytest.raises(RuntimeError, match="no forward-mode derivatives"):
            forward_mode(inputs[0])
