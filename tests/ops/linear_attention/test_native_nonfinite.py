"""Infinite inputs are infinite where they count, and NaN goes where the recurrence takes it."""

import math

import pytest
import torch

import fulmen
from fulmen.runtime import core

pytestmark = pytest.mark.skipif(core.core is None, reason=core.why_unavailable)

LENGTH, AT = 100, 50
NAMES = ("q", "k", "v", "grad_output")
DECAYS = {
    "none": lambda *size: None,
    "token": lambda *size: torch.full((1, LENGTH, 1), -0.1),
    "channel": lambda *size: torch.full((1, LENGTH, 1, *size), -0.1),
}


def its_chunk(dtype):
    """Where a product with the tokens that do not count is 0 · inf: in tiles, of 32 tokens from either end."""
    in_tiles = core.core.multiplies_tiles and dtype == torch.bfloat16
    return slice(32, 68) if in_tiles else slice(48, 64)


def run(q, k, v, grad_output, log_decay, backend):
    """The output and the gradients of q, k and v."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    output = fulmen.linear_attention(*leaves, log_decay=log_decay, scale=1.0, backend=backend)
    return output.detach(), *torch.autograd.grad(output, leaves, grad_output)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize("infinite", NAMES)
@pytest.mark.parametrize(("key_size", "value_size"), [(1, 1), (16, 16), (20, 16), (16, 20), (21, 33)])
def test_sizes_that_are_padded(key_size, value_size, infinite, decays, dtype, tolerance):
    """Of positive inputs no term is 0 · inf, unless it is one of the padding."""
    torch.manual_seed(0)
    sizes = (key_size, key_size, value_size, value_size)
    given = {n: (torch.rand(1, LENGTH, 1, size) + 0.1).to(dtype) for n, size in zip(NAMES, sizes, strict=True)}
    given[infinite][0, AT, 0, 0] = math.inf
    log_decay = DECAYS[decays](key_size)
    exact = run(**{n: x.double() for n, x in given.items()}, log_decay=log_decay, backend="reference")
    for got, want in zip(run(**given, log_decay=log_decay, backend="native"), exact, strict=True):
        assert not want.isnan().any()
        got, want = got.double().clone(), want.clone()
        chunk = its_chunk(dtype)
        got[:, chunk] = want[:, chunk] = 0
        torch.testing.assert_close(got, want, rtol=tolerance, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decays", ["token", "channel"])
@pytest.mark.parametrize("schedule", ["auto", "recurrent"])
def test_a_decay_of_minus_infinity_does_not_forget_nan(decays, schedule, dtype):
    """In the chunk of both and after it: 0 · NaN is NaN."""
    torch.manual_seed(0)
    q, k, v = (torch.rand(1, LENGTH, 1, 16).to(dtype) for _ in range(3))
    k[0, 5] = math.nan
    log_decay = DECAYS[decays](16)
    log_decay[0, 10] = -math.inf
    output, state = fulmen.linear_attention(
        q, k, v, log_decay=log_decay, schedule=schedule, return_state=True, backend="native"
    )
    assert not output[:, :5].isnan().any()
    assert output[:, 5:].isnan().all()
    assert state.isnan().all()
