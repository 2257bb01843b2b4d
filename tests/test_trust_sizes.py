"""Sizes at which 32-bit offsets end. Up to 9 GB of memory, and minutes: `make test-long`."""

import pytest
import torch

import fulmen
from fulmen.lab.fuzz import Problem, Setting, wrong
from fulmen.lab.operators.causal_conv1d.cases import Case as Convolution
from fulmen.lab.operators.delta_rule.cases import Case as Delta
from fulmen.lab.operators.linear_attention.cases import Case as Attention
from fulmen.lab.operators.output_gate.checks import Case as Gate
from fulmen.lab.operators.tpa.checks import Case as Decode
from fulmen.lab.tolerances import relative_error
from fulmen.runtime import core

pytestmark = [
    pytest.mark.skipif(core.core is None, reason=core.why_unavailable),
    pytest.mark.not_interpreted,
    pytest.mark.one_build,
    pytest.mark.long,
]
PATTERN = 251  # tokens after which values repeat
LAST = 200  # tokens at the end that are compared: what was before them has decayed to nothing
HEADS, SIZE, TOKENS = 128, 512, 2**15 + 3  # together more than 2^31


def repeated(length, *shape):
    """bfloat16 ``[1, length, *shape]`` whose values repeat, so that making them takes no time."""
    pattern = torch.randn(1, PATTERN, *shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()
    made = torch.empty(1, length, *shape, dtype=torch.bfloat16)
    for start in range(0, length, PATTERN):
        made[:, start : start + PATTERN] = pattern[:, : length - start]
    return made


def end(x):
    return x[:, -LAST:].detach().double()


def differentiate(function, given, backend):
    """Of a sum over tokens: its gradient is one row for all of them, and takes no memory."""
    output = function(**given, backend=backend)
    last = end(output)
    loss = output.sum((0, 1, 2)) @ torch.linspace(-1, 1, output.shape[-1], dtype=output.dtype)
    del output
    loss.backward()
    return {"output": last} | {name: end(x.grad) for name, x in given.items()}


def assert_ends_agree(function, given):
    """The results at the last tokens, and the gradients there. The first of these have another past: none."""
    few = {name: end(x).requires_grad_() for name, x in given.items()}
    expected = differentiate(function, few, "torch")
    found = differentiate(function, {name: x.requires_grad_() for name, x in given.items()}, "native")
    for name, x in found.items():
        assert relative_error(x[:, LAST // 2 :], expected[name][:, LAST // 2 :]) <= 2**-7, name


def attention(**given):
    return fulmen.linear_attention(**given, log_decay=torch.full((HEADS,), -0.5, dtype=given["v"].dtype).float())


@pytest.mark.parametrize("large", ["q", "k", "v"])
def test_linear_attention_of_more_than_2_31_elements(large):
    shapes = {"q": (1, 1), "k": (1, 1), "v": (1, 1)} | {large: (HEADS, SIZE)}
    if large in "qk":
        shapes |= {"q": (1, SIZE), "k": (1, SIZE)} | {large: (HEADS, SIZE)}
    assert_ends_agree(attention, {name: repeated(TOKENS, *shape) for name, shape in shapes.items()})


def delta(q, k, v, beta, backend):
    decay = torch.full((HEADS,), -0.5, dtype=torch.float64 if v.dtype == torch.float64 else torch.float32)
    return fulmen.delta_rule(q, k, v, beta, log_decay=decay, normalize_qk=True, backend=backend)


def test_the_delta_rule_of_more_than_2_31_elements():
    given = {"q": repeated(TOKENS, 1, 3), "k": repeated(TOKENS, 1, 3), "v": repeated(TOKENS, HEADS, SIZE)}
    assert_ends_agree(delta, given | {"beta": repeated(TOKENS, HEADS).sigmoid()})


def test_a_convolution_of_more_than_2_31_elements():
    x, weight = repeated(TOKENS, HEADS * SIZE), torch.randn(HEADS * SIZE, 4).bfloat16()
    output = fulmen.causal_conv1d(x, weight, backend="native")
    expected = fulmen.causal_conv1d(end(x), weight.double(), backend="torch")
    assert relative_error(output[:, -LAST // 2 :], expected[:, -LAST // 2 :]) <= 2**-8


@pytest.mark.parametrize("operator", ["linear_attention", "delta_rule"])
def test_a_million_tokens(operator):
    """Forward and backward, no decay at all for linear attention: the state is a sum of a million terms."""
    length, generator = 2**20 + 3, torch.Generator().manual_seed(0)
    given = {name: torch.randn(1, length, 2, 16, generator=generator, requires_grad=True) for name in "qkv"}
    if operator == "linear_attention":
        _, state = fulmen.linear_attention(**given, return_state=True, backend="native")
        exact = torch.einsum("bnhd,bnhe->bhde", given["k"].detach().double(), given["v"].detach().double())
        assert relative_error(state.detach(), exact) <= 1e-5
        state.sum().backward()
        assert (
            relative_error(given["k"].grad, given["v"].detach().double().sum(-1, keepdim=True).expand_as(given["k"]))
            <= 1e-5
        )
        return
    beta = torch.rand(1, length, 2, generator=generator)
    output = fulmen.delta_rule(**given, beta=beta, normalize_qk=True, backend="native")
    output.sum().backward()
    few = {name: x[:, -5000:].detach().double() for name, x in given.items()}
    expected = fulmen.delta_rule(**few, beta=beta[:, -5000:].double(), normalize_qk=True, backend="torch")
    assert relative_error(output[:, -100:].detach(), expected[:, -100:]) <= 1e-5
    assert all(torch.isfinite(x.grad).all() for x in given.values())


MANY = {"batch": 100, "length": 5, "heads": (100, 100, 100), "key_size": 8, "value_size": 8}
MANY_HEADS = [
    Problem("linear_attention", Attention(**MANY)),
    Problem("linear_attention_step", Attention(**MANY | {"length": 1})),
    Problem("chunk_states", Attention(**MANY)),
    Problem("delta_rule", Delta(**MANY)),
    Problem("delta_rule_step", Delta(**MANY | {"length": 1})),
    Problem("causal_conv1d", Convolution(channels=10_000)),
    Problem("causal_conv1d_step", Convolution(channels=10_000, length=1)),
    Problem("tpa_decode", Decode(heads=5_000, tokens=5)),
    Problem("output_gated_attention", Gate(heads=5_000, queries=5, keys=5)),
]


@pytest.mark.parametrize("problem", MANY_HEADS, ids=lambda problem: problem.operator)
def test_ten_thousand_heads(problem):
    assert wrong(problem, Setting("native", threads=2)) == []
