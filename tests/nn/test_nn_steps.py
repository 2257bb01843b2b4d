"""A decode step that is a program of the CPU core: what the modules compute, and never what somebody else watches."""

import copy
import subprocess
import sys

import pytest
import torch
from layers import HIDDEN, RECURRENT, layer, relative, tokens
from torch.nn import functional
from torch.profiler import profile

from fulmen import nn
from fulmen.nn import step as steps
from fulmen.nn.traced import MOST_ROWS, traced
from fulmen.runtime import core
from fulmen.runtime.program import Program
from fulmen.runtime.warning import warn_once

pytestmark = pytest.mark.skipif(core.core is None, reason=core.why_unavailable)


@pytest.fixture(autouse=True)
def forgotten():
    steps._known.clear()


@pytest.fixture
def programs(monkeypatch):
    """The programs that were run."""
    run, original = [], Program.__call__
    monkeypatch.setattr(Program, "__call__", lambda self, tensors: run.append(self) or original(self, tensors))
    return run


def prefilled(made, rows=1, dtype=torch.float32):
    cache = nn.LayerCache()
    with torch.no_grad():
        made(tokens(rows, 5, dtype=dtype), cache=cache)
    return cache


def by_modules(made, x, cache):
    """The same step where something watches."""
    handle = made.register_forward_hook(lambda *_: None)
    try:
        return made(x, cache=cache)
    finally:
        handle.remove()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", RECURRENT)
@torch.no_grad()
def test_it_computes_what_the_modules_do(name, rows, dtype, programs):
    made = layer(name, dtype)
    cache = prefilled(made, rows, dtype)
    expected_cache, tolerance = copy.deepcopy(cache), 1e-5 if dtype == torch.float32 else 3e-2
    for i in range(4):
        x = tokens(rows, 1, seed=i, dtype=dtype)
        found, expected = made(x, cache=cache), by_modules(made, x, expected_cache)
        assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert relative(found.double(), expected.double()) < tolerance
        for key, state in cache.states.items():
            assert relative(state.double(), expected_cache.states[key].double()) < tolerance
    assert len(programs) == 3


@pytest.mark.parametrize("name", RECURRENT)
@torch.no_grad()
def test_the_first_step_has_the_bits_of_the_next(name, programs):
    made, x = layer(name), tokens(2, 1)
    first, second = (prefilled(made, 2) for _ in range(2))
    assert torch.equal(made(x, cache=first), made(x, cache=second))
    assert all(torch.equal(state, second.states[key]) for key, state in first.states.items())
    assert len(programs) == 1


@torch.no_grad()
def test_layers_of_the_same_sizes_share_a_program(programs):
    for seed in range(3):
        torch.manual_seed(seed)
        made, x = nn.GatedDeltaNet(HIDDEN, 2, key_size=8, value_size=8), tokens(1, 1)
        cache = prefilled(made)
        expected = by_modules(made, x, copy.deepcopy(cache))
        assert relative(made(x, cache=cache), expected) < 1e-5
    assert len(programs) == 2
    assert len(steps._known) == 1


class Scaled(torch.nn.Linear):
    """What LoRA, quantisation and the like put in a layer's place."""

    def forward(self, x):
        return 3 * super().forward(x)


def replace(made):
    made.g_proj.__class__ = Scaled


def hook(made):
    made.g_proj.register_forward_hook(lambda module, args, output: 3 * output)


def pre_hook(made):
    made.g_proj.register_forward_pre_hook(lambda module, args: (3 * args[0],))


def own_forward(made):
    forward = made.g_proj.forward
    made.g_proj.forward = lambda x: 3 * forward(x)


def own_mix(made):
    mix = made.mix
    made.mix = lambda x, call: 3 * mix(x, call)


def compiled(made):
    made.g_proj._compiled_call_impl = lambda x: 3 * functional.linear(x, made.g_proj.weight)


def data(made):
    made.g_proj.weight.data.mul_(3)


def other_data(made):
    made.g_proj.weight.data = 3 * made.g_proj.weight.data


def strides(made):
    made.g_proj.weight.data = (3 * made.g_proj.weight.data).T.contiguous().T


def other_dtype(made):
    made.double()


def option(made):
    made.g_norm_swish_gate.eps = 3.0


def normalizer(made):
    made.gate_logit_normalizer = 1.0


def bias(made):
    made.g_proj.bias = torch.nn.Parameter(torch.ones(made.g_proj.out_features))


def no_parameter(made):
    weight = made.g_proj.weight.detach()
    del made.g_proj.weight
    made.g_proj.weight = 3 * weight


def parametrized(made):
    class Three(torch.nn.Module):
        def forward(self, x):
            return 3 * x

    torch.nn.utils.parametrize.register_parametrization(made.g_proj, "weight", Three())


@pytest.mark.parametrize("where", [0, 2])
@pytest.mark.parametrize(
    "change",
    [
        replace,
        hook,
        pre_hook,
        own_forward,
        own_mix,
        compiled,
        data,
        other_data,
        strides,
        other_dtype,
        option,
        normalizer,
        bias,
        no_parameter,
        parametrized,
    ],
)
@torch.no_grad()
def test_what_changes_a_layer_changes_its_steps(change, where):
    """Before its first step and after some, and in each step from then on."""
    made = layer("GatedLinearAttention")
    cache = prefilled(made)
    for i in range(where):
        made(tokens(1, 1, seed=i), cache=cache)
    before = copy.deepcopy(cache)
    unchanged = made(tokens(1, 1), cache=copy.deepcopy(cache))
    change(made)
    dtype = made.o_proj.weight.dtype
    for i in range(3):
        cache = copy.deepcopy(before)
        if dtype == torch.float64:
            cache.states = {key: state.double() for key, state in cache.states.items()}
        expected = by_modules(made, tokens(1, 1, dtype=dtype), copy.deepcopy(cache))
        found = made(tokens(1, 1, dtype=dtype), cache=cache)
        assert relative(found, expected) < 1e-5, i
        if dtype != torch.float64:
            assert relative(found, unchanged) > 1e-3


@torch.no_grad()
def test_modules_in_another_order():
    made, x = layer("GatedLinearAttention"), tokens(1, 1)
    cache = prefilled(made)
    made(x, cache=cache)
    modules = dict(made._modules)
    made._modules.clear()
    made._modules |= {"k_proj": modules["k_proj"], "q_proj": modules["q_proj"], **modules}
    expected = by_modules(made, x, copy.deepcopy(cache))
    assert relative(made(x, cache=cache), expected) < 1e-5


@torch.no_grad()
def test_a_module_that_is_none():
    made, x = layer("GatedLinearAttention with convolutions"), tokens(1, 1)
    cache = prefilled(made)
    made(x, cache=cache)
    made.q_conv1d = None  # and so there is no convolution
    expected = by_modules(made, x, copy.deepcopy(cache))
    for _ in range(2):
        assert relative(made(x, cache=copy.deepcopy(cache)), expected) < 1e-5


@torch.no_grad()
def test_a_hook_of_all_modules_is_called():
    made, seen = layer("GatedLinearAttention"), []
    cache = prefilled(made)
    for _ in range(2):
        made(tokens(1, 1), cache=cache)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        made(tokens(1, 1), cache=cache)
    finally:
        handle.remove()
    assert made.g_proj in seen


@pytest.mark.parametrize(
    "block", [profile, lambda: torch.autocast("cpu"), torch.enable_grad, lambda: torch.device("cpu")]
)
def test_where_something_watches_modules_are_called(block, programs):
    made = layer("GatedDeltaNet")
    cache = prefilled(made)
    with torch.no_grad():
        for _ in range(2):
            made(tokens(1, 1), cache=cache)
    del programs[:]
    with block():
        assert made(tokens(1, 1), cache=cache).requires_grad == torch.is_grad_enabled()
    assert not programs


@torch.inference_mode()
def test_inference_mode(programs):
    made, x = layer("GatedLinearAttention"), tokens(1, 1)
    cache = prefilled(made)
    for _ in range(3):
        expected = by_modules(made, x, copy.deepcopy(cache))
        found = made(x, cache=cache)
        assert found.is_inference()
        assert relative(found, expected) < 1e-5
    assert len(programs) == 2


@torch.no_grad()
def test_more_rows_than_the_core_multiplies(programs):
    made = layer("GatedLinearAttention")
    cache = prefilled(made, MOST_ROWS + 1)
    for _ in range(2):
        made(tokens(MOST_ROWS + 1, 1), cache=cache)
    assert not programs


def test_autograd_sees_that_states_have_changed(programs):
    made = layer("GatedLinearAttention")
    cache = prefilled(made)
    weight = torch.ones_like(cache.states["recurrent"], requires_grad=True)
    with torch.no_grad():
        made(tokens(1, 1), cache=cache)
    product = (weight * cache.states["recurrent"]).sum()
    with torch.no_grad():
        made(tokens(1, 1), cache=cache)
    assert programs
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@torch.no_grad()
def test_a_decay_that_grows_is_told_of(programs):
    made = layer("GatedLinearAttention")
    cache = prefilled(made)
    made.gate_logit_normalizer = -1.0
    for count in range(2):
        warn_once.cache_clear()
        with pytest.warns(UserWarning, match="natural logarithm"):
            made(tokens(1, 1), cache=cache)
        assert len(programs) == count


# ---- the core's calls ------------------------------------------------------------------------------------------------


def again(function, *arguments):
    """``function(*arguments)`` of the core, and of a program that was made for other numbers."""
    others = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).uniform_() for x in arguments]
    _, program = traced(lambda: function(*others), others)
    result, _ = traced(lambda: function(*arguments), list(arguments))
    assert torch.equal(program(list(arguments)), result) or result.isnan().any()
    return result


@pytest.mark.parametrize("dtype", core.DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 512, 256), (4, 70, 33), (3, 1, 1), (2, 15, 2), (1, 17, 5)])
@torch.no_grad()
def test_products(rows, inputs, outputs, with_bias, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    arguments = [x, weight] + [torch.randn(outputs).to(dtype)] * with_bias
    found = again(functional.linear, *arguments)
    expected = functional.linear(*(y.double() for y in arguments))
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    assert found.dtype == dtype
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()
    alone = again(functional.linear, x[:1], *arguments[1:])
    assert torch.equal(alone, found[:1])


SPECIAL = [0.0, -0.0, 1e-8, -1e-8, 20.0, 20.5, -20.0, 80.0, -80.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan]
FUNCTIONS = {
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "exp": torch.exp,
    "neg": torch.neg,
    "softplus": functional.softplus,
    "logsigmoid": functional.logsigmoid,
    "clamp": lambda x: x.clamp(-0.5, 1.5),
    "float": lambda x: x.to(torch.bfloat16),
    "add": lambda x: x + 0.1,
    "div": lambda x: x / 3.0,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@torch.no_grad()
def test_functions_of_one_number(name):
    x = torch.cat((torch.linspace(-30, 30, 999), torch.tensor(SPECIAL)))
    found, expected = again(FUNCTIONS[name], x), FUNCTIONS[name](x.double())
    rtol = 8e-3 if found.dtype == torch.bfloat16 else 3e-6
    torch.testing.assert_close(found.double(), expected.double(), rtol=rtol, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("dtype", core.DTYPES)
@pytest.mark.parametrize(
    "shapes", [((2, 3, 40), (2, 3, 40)), ((2, 3, 40), (3, 1)), ((3, 40), (40,)), ((1, 5), (2, 3, 5)), ((4,), (1,))]
)
@torch.no_grad()
def test_functions_of_two_numbers(shapes, dtype):
    torch.manual_seed(0)
    a, b = (torch.randn(shape).to(dtype) for shape in shapes)
    wide = torch.randn(*shapes[0], 2).to(dtype)[..., 0]
    for first in (a, wide):
        for function in (torch.add, torch.mul, torch.div):
            torch.testing.assert_close(again(function, first, b), function(first, b))
        torch.testing.assert_close(again(torch.mul, first.float(), b), first.float() * b)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x @ y.T.contiguous().T @ y,
        lambda x, y: torch.tanh(x),
        lambda x, y: torch.add(x, y[:1, :8], alpha=2),
        lambda x, y: functional.softplus(x, beta=2),
        lambda x, y: x.double() * 2,
        lambda x, y: (x * 2)[:, :4],
        lambda x, y: x.view(-1),
        lambda x, y: x.mul_(2.0),
        lambda x, y: x[:, :4].mul_(2.0),
        lambda x, y: x + torch.ones(8),
    ],
)
@torch.no_grad()
def test_what_is_not_a_program(function):
    x, y = torch.randn(1, 8), torch.randn(8, 8)
    expected = function(x.clone(), y)
    result, program = traced(lambda: function(x, y), [x, y])
    assert program is None
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("weight", [torch.randn(3, 7), torch.randn(3, 8).bfloat16(), torch.randn(8)])
@torch.no_grad()
def test_products_that_torch_refuses_are_refused(weight):
    x = torch.randn(1, 8).requires_grad_()
    with pytest.raises(RuntimeError):
        traced(lambda: functional.linear(x, weight, torch.ones(2)), [x, weight])


@torch.no_grad()
def test_arguments_that_share_memory_make_no_program():
    x = torch.randn(2, 8)
    assert traced(lambda: x + x[:1], [x, x[:1]])[1] is None
    assert traced(lambda: x[1:] + x[:1], [x[1:], x[:1]])[1] is not None


def test_the_first_step_imports_nothing_heavy():
    code = """
import sys, torch
from fulmen.nn import GatedDeltaNet, GatedLinearAttention, LayerCache
torch.set_grad_enabled(False)
for layer in (GatedDeltaNet(16, 1, key_size=8, value_size=8), GatedLinearAttention(16, 1)):
    cache = LayerCache()
    layer(torch.randn(1, 2, 16), cache=cache)
    layer(torch.randn(1, 1, 16), cache=cache)
print([name for name in ("sympy", "torch._dynamo", "torch._inductor") if name in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
