"""Without a private name of torch, the public way gives the same gradients."""

import subprocess
import sys

CODE = """
import torch
del torch._C._any_requires_grad                  # as a later torch might
import fulmen
from fulmen.ops.linear_attention import custom_op
from torch.func import grad, jacrev, vmap

assert custom_op.linear_attention is not torch.ops.fulmen.linear_attention.default
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
