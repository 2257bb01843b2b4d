"""Which bfloat16 calls round factors of products, and what they leave behind."""

import pytest
import torch

import fulmen
from fulmen.runtime import core

pytestmark = pytest.mark.skipif(core.core is None, reason=core.why_unavailable)

DECAYS = {
    "none": lambda n, h, d: None,
    "head": lambda n, h, d: -torch.rand(h),
    "token": lambda n, h, d: -torch.rand(1, n, h),
    "channel": lambda n, h, d: -torch.rand(1, n, h, d),
}


def run(q, k, v, grad, **options):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    output = fulmen.linear_attention(*leaves, **options, backend="native")
    return output.detach(), *torch.autograd.grad(output, leaves, grad)


def rounded(given, **options):
    """Of the output, dq, dk and dv: whether each is not what it would be in floats."""
    in_floats = run(*(x.float() for x in given), **options)
    results = zip(run(*given, **options), in_floats, strict=True)
    return [not torch.equal(got, exact.to(torch.bfloat16)) for got, exact in results]


@pytest.mark.parametrize("isa", core.core.builds if core.core else [])
@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize("size", [8, 48])
def test_who_rounds(isa, decays, size):
    torch.manual_seed(0)
    given = [torch.randn(1, 150, 2, size).bfloat16() for _ in range(4)]
    log_decay = DECAYS[decays](150, 2, size)
    with core.core.using(isa):
        pairs, tiles = core.core.multiplies_pairs, core.core.multiplies_tiles
        forward = size >= 16 and (pairs or tiles)
        backward = size >= 16 and (pairs or (tiles and decays != "channel"))
        assert rounded(given, log_decay=log_decay) == [forward] + [backward] * 3


@pytest.mark.parametrize("isa", core.core.builds if core.core else [])
@pytest.mark.parametrize("requested", ["decay", "shared", "state"])
def test_gradients_that_tiles_leave_to_floats(isa, requested):
    """Those of a decay and of inputs that heads share, and beside that of a state those of keys and values."""
    torch.manual_seed(0)
    heads = 1 if requested == "shared" else 2
    q, k, v, grad = (torch.randn(1, 150, h, 32).bfloat16() for h in (heads, heads, 2, 2))
    log_decay = -torch.rand(2)
    log_decay.requires_grad_(requested == "decay")
    state = torch.randn(1, 2, 32, 32, requires_grad=requested == "state")

    def gradients(*given):
        leaves = [x.clone().requires_grad_() for x in given]
        output = fulmen.linear_attention(*leaves, log_decay=log_decay, initial_state=state, backend="native")
        others = [x for x in (log_decay, state) if x.requires_grad]
        return torch.autograd.grad(output, leaves + others, grad.to(output.dtype))

    with core.core.using(isa):
        if core.core.multiplies_pairs:
            pytest.skip("pairs round these gradients too; only tiles leave them to floats")
        found, exact = gradients(q, k, v), gradients(q.float(), k.float(), v.float())
        for i, (got, want) in enumerate(zip(found, exact, strict=True)):
            of_queries = requested == "state" and i == 0  # a forward by itself
            assert torch.equal(got, want.to(got.dtype)) != (of_queries and core.core.multiplies_tiles)


def test_a_call_leaves_subnormal_numbers_to_others():
    """Threads of tiles take them as zero while they compute, and no longer."""
    tiny = torch.full((1 << 16,), 1e-40)
    q = torch.randn(1, 4096, 8, 32).bfloat16()
    before = tiny * 0.5
    fulmen.linear_attention(q, q, q, log_decay=torch.full((8,), -3.0), backend="native")
    assert torch.equal(tiny * 0.5, before)
    assert before.count_nonzero() == before.numel()


def test_decays_that_pass_through_subnormal_numbers():
    """e^-1.5 a token: within a chunk weights fall below 1e-38, and what they weigh is as good as nothing."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 200, 2, 32).bfloat16() for _ in range(3))
    log_decay = torch.full((1, 200, 2), -1.5)
    got, state = fulmen.linear_attention(q, k, v, log_decay=log_decay, return_state=True, backend="native")
    doubles = [x.double() for x in (q, k, v)]
    exact, final = fulmen.linear_attention(
        *doubles, log_decay=log_decay.double(), return_state=True, backend="reference"
    )
    assert (got - exact).norm() <= 3.3e-3 * exact.norm()
    assert (state - final).norm() <= 2e-3 * final.norm()
