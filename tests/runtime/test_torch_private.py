"""What private names of torch are for; and without them, the public way gives the same results."""

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fulmen
from fulmen.runtime.torch_private import fake_tensors, only_the_kernel_runs

CODE = """
import torch
# As a later torch might; it needs the second itself.
del torch._C._any_requires_grad
asked = torch._C.__dict__.pop("_is_any_autocast_enabled")
import fulmen
torch._C._is_any_autocast_enabled = asked
from fulmen.runtime import torch_private
from torch.func import grad, jacrev, vmap

assert torch_private._pieces_of_autograd() is None
assert not torch_private.only_the_kernel_runs((torch.empty(1),))
torch.manual_seed(0)
inputs = tuple(torch.randn(1, 5, 2, 3) for _ in range(3))


def functions(backend):
    yield lambda q, k, v: fulmen.linear_attention(q, k, v, log_decay=-(v[0, 0, :, 0] ** 2), backend=backend)
    yield lambda q, k, v: fulmen.chunk_states(q * k, v, chunk_size=2, backend=backend)
    yield lambda q, k, v: fulmen.output_gated_attention(q, k, v, 2 * v, backend=backend)


def same(found, expected):
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


for backend in ("native", "torch"):
    for function, reference in zip(functions(backend), functions("torch")):
        loss = lambda *x: function(*x).square().sum()
        leaves = [x.clone().requires_grad_() for x in inputs]
        expected = torch.autograd.grad(reference(*leaves).square().sum(), leaves)
        same(torch.autograd.grad(loss(*leaves), leaves), expected)
        same(grad(loss, (0, 1, 2))(*inputs), expected)
        same(jacrev(loss, (0, 1, 2))(*inputs), expected)
        batch = [torch.stack([x, 2 * x]) for x in inputs]
        same(vmap(function)(*batch), [function(*x) for x in zip(*batch)])
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        leaves = [x.clone().requires_grad_() for x in inputs]
        compiled(*leaves).backward()
        same([x.grad for x in leaves], expected)
        torch.compiler.reset()
q = torch.randn(1, 5, 2, 3, requires_grad=True)
(first,) = torch.autograd.grad(fulmen.linear_attention(q, q, q).sum(), q, create_graph=True)
try:
    first.sum().backward()
except RuntimeError as error:
    assert "no double backward" in str(error), error
else:
    raise AssertionError("a second derivative is silently wrong")
"""


def test_the_public_way():
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


class Subclass(torch.Tensor):
    pass


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        seen.append(str(function))
        return function(*args, **(kwargs or {}))


class SeenFirst(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        seen.append(str(function))
        return function(*args, **(kwargs or {}))


seen = []


def test_a_plain_call_needs_no_dispatcher():
    x = torch.randn(2)
    leaf = x.clone().requires_grad_()
    assert only_the_kernel_runs((x, None, 1.0, "auto", torch.nn.Parameter(x, requires_grad=False)))
    with torch.no_grad():
        assert only_the_kernel_runs((leaf,))
    with torch.inference_mode():
        assert only_the_kernel_runs((x, torch.empty(1)))


@pytest.mark.parametrize(
    ("arrange", "block"),
    {
        "gradient": (lambda x: x.requires_grad_(), nullcontext),
        "subclass": (lambda x: x.as_subclass(Subclass), nullcontext),
        "negated": (lambda x: x._neg_view(), nullcontext),
        "meta": (lambda x: x.to("meta"), nullcontext),
        "autocast": (lambda x: x, lambda: torch.autocast("cpu")),
        "dispatch mode": (lambda x: x, Seen),
        "function mode": (lambda x: x, SeenFirst),
        "profiler": (lambda x: x, torch.profiler.profile),
        "fake": (lambda x: x, fake_tensors),
    }.values(),
)
def test_all_else_is_the_dispatchers(arrange, block):
    x, plain = arrange(torch.randn(2)), torch.randn(2)
    with block():
        assert not only_the_kernel_runs((plain, x))
    assert only_the_kernel_runs((plain, plain))


def test_transforms_and_tracers_are_the_dispatchers():
    def function(x):
        found.append(only_the_kernel_runs((x, torch.ones(1))))
        return x.sum()

    found, x = [], torch.randn(2)
    torch.func.grad(function)(x)
    torch.func.vmap(function)(x)
    torch.func.functionalize(function)(x)
    torch.jit.trace(function, x, check_trace=False)
    assert found == [False] * 4


@pytest.mark.parametrize("mode", [Seen, SeenFirst])
def test_modes_see_calls(mode):
    q = torch.randn(1, 3, 1, 4)
    expected = fulmen.linear_attention(q, q, q)
    seen.clear()
    with mode():
        assert torch.equal(fulmen.linear_attention(q, q, q), expected)
    assert "fulmen.linear_attention.default" in seen


def test_profilers_see_calls():
    q, state = torch.randn(1, 1, 4), torch.zeros(1, 1, 4, 4)
    with torch.profiler.profile() as profile:
        fulmen.linear_attention_step(q, q, q, state)
    assert "fulmen::linear_attention_step" in {event.key for event in profile.key_averages()}
