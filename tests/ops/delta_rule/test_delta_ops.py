"""The custom ops: torch.compile, torch.export, opcheck, autocast, and what is refused."""

import pytest
import torch

import fulmen
from cases import BACKENDS
from fulmen.lab.operators.delta_rule.cases import Case, options, run, tensors
from fulmen.ops.delta_rule.custom_op import OPERATOR

BACKEND = pytest.mark.parametrize("backend", [name for name in BACKENDS if name in OPERATOR.backends])
OPS = torch.ops.fulmen
SMALL = Case(length=9, key_size=4, value_size=3, heads=(1, 1, 2), decays="channel")
INPUTS = ("q", "k", "v", "beta")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@BACKEND
@pytest.mark.parametrize("case", [SMALL, SMALL._replace(decays="none", packed=(3, 0, 4), initial=False)])
def test_opcheck(backend, case):
    x = {name: y.clone().requires_grad_() for name, y in tensors(case).items()}
    inputs = (*(x[name] for name in INPUTS), x.get("log_decay"), True, 0.5, x.get("initial_state"))
    args = (*inputs, options(case)["cu_seqlens"], "auto", True, backend)
    torch.library.opcheck(OPS.delta_rule.default, args)


@BACKEND
def test_opcheck_of_the_step(backend):
    x = tensors(SMALL)
    token, state = [x[name][:, 0] for name in INPUTS], x["initial_state"].clone()
    torch.library.opcheck(OPS.delta_rule_step.default, (*token, state, x["log_decay"][:, 0], True, 0.5, backend))


@BACKEND
def test_compiled_without_graph_breaks(backend):
    """Forward and backward of the compiled function are those of the eager one, bit for bit."""
    given = tensors(SMALL)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(leaves):
        return fulmen.delta_rule(**leaves, normalize_qk=True, return_state=True, backend=backend)

    leaves = {name: x.detach().requires_grad_() for name, x in given.items() if not name.startswith("grad")}
    results = call(leaves)
    found = torch.autograd.grad(results, list(leaves.values()), (given["grad_output"], given["grad_state"]))
    eager = run(SMALL, given, backend)
    assert torch.equal(results[0], eager["output"])
    assert torch.equal(results[1], eager["state"])
    for name, x in zip(leaves, found, strict=True):
        assert torch.equal(x, eager[f"d{name}"]), name


def test_a_compiled_step_updates_the_state():
    """With operations around, in a graph without mutations, as inductor gets it."""
    x = tensors(SMALL)

    @torch.compile(fullgraph=True, backend="aot_eager_decomp_partition")
    def decode(q, k, v, beta, state):
        return fulmen.delta_rule_step(q * 2, k, v, beta, state, normalize_qk=True) + 1

    token = [x[name][:, 0] for name in INPUTS]
    state, expected_state = x["initial_state"].clone(), x["initial_state"].clone()
    expected = fulmen.delta_rule_step(token[0] * 2, *token[1:], expected_state, normalize_qk=True) + 1
    torch.testing.assert_close(decode(*token, state), expected)
    assert torch.equal(state, expected_state)


def test_exported_with_a_dynamic_length():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, beta):
            return fulmen.delta_rule(q, k, v, beta, normalize_qk=True, return_state=True)

    def inputs(length):
        return tuple(tensors(SMALL._replace(length=length))[name] for name in INPUTS)

    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(Layer(), inputs(9), dynamic_shapes=({1: length},) * 4)
    for found, expected in zip(program.module()(*inputs(70)), Layer()(*inputs(70)), strict=True):
        assert torch.equal(found, expected)


@BACKEND
def test_autocast_casts_q_k_and_v_and_nothing_else(backend):
    x = tensors(SMALL)
    q, k, v = (x[name] for name in "qkv")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = fulmen.delta_rule(q, k, v, x["beta"], log_decay=x["log_decay"], backend=backend)
    rounded = (y.bfloat16() for y in (q, k, v))
    assert torch.equal(output, fulmen.delta_rule(*rounded, x["beta"], log_decay=x["log_decay"], backend=backend))


@BACKEND
def test_only_the_requested_gradients(backend):
    x = tensors(SMALL)
    whole = run(SMALL, x, backend)
    for name in ("q", "k", "v", "beta", "log_decay", "initial_state"):
        given = {n: y.detach() for n, y in x.items() if not n.startswith("grad")}
        given[name] = given[name].clone().requires_grad_()
        results = fulmen.delta_rule(**given, normalize_qk=True, return_state=True, backend=backend)
        (grad,) = torch.autograd.grad(results, given[name], (x["grad_output"], x["grad_state"]))
        assert torch.equal(grad, whole[f"d{name}"]), name
