"""An infinite input is infinite where it counts, and nowhere else."""

import math

import pytest
import torch

import fulmen
from fulmen.runtime import core

NAMES = ("q", "k", "v", "gate", "grad_output")


def run(q, k, v, gate, grad_output, backend):
    """The output and the gradients of the four inputs."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v, gate)]
    output = fulmen.output_gated_attention(*leaves, backend=backend)
    return output.detach(), *torch.autograd.grad(output, leaves, grad_output)


@pytest.mark.skipif(core.core is None, reason=core.why_unavailable)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("infinite", NAMES)
@pytest.mark.parametrize(("key_size", "value_size"), [(1, 1), (8, 8), (8, 16), (16, 8), (20, 33)])
def test_native_sizes_that_are_padded(key_size, value_size, infinite, dtype, tolerance):
    """Of positive inputs no term is 0 · inf, unless it is one of the padding."""
    torch.manual_seed(0)
    sizes = (key_size, key_size, value_size, value_size, value_size)
    given = {name: (torch.rand(1, 20, 2, n) + 0.1).to(dtype) for name, n in zip(NAMES, sizes, strict=True)}
    given[infinite][0, 3, 1, 0] = math.inf
    exact = run(**{name: x.double() for name, x in given.items()}, backend="reference")
    for got, want in zip(run(**given, backend="native"), exact, strict=True):
        assert not want.isnan().any()
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=0.0)
