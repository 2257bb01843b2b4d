"""Decay weights by doubling."""

import pytest
import torch

from fulmen.ops.chunks.weights import Decay, pair_weights, sum_before, sum_from


@pytest.mark.parametrize("tokens", [1, 2, 8, 64])
def test_pair_weights_are_exponents_of_partial_sums(tokens):
    logs = -torch.rand(3, 1, 2, tokens, 1, dtype=torch.float64)
    weights = pair_weights(Decay(logs.clone()))
    for i in range(tokens):
        for j in range(tokens):
            want = logs[..., j + 1 : i + 1, 0].sum(-1).exp() if j <= i else torch.zeros(3, 1, 2, dtype=torch.float64)
            assert torch.allclose(weights[..., i, j], want, rtol=1e-13, atol=0)


def test_a_strong_decay_does_not_spoil_its_neighbours():
    """From cumulative sums, e^{b_i - b_j} beside a decay of -90 would be off by 1e-5, and NaN after -inf."""
    logs = torch.full((1, 1, 1, 64, 1), -1e-3)
    logs[..., 20, 0], logs[..., 40, 0] = -90.0, -torch.inf
    weights = pair_weights(Decay(logs.clone()))[0, 0, 0].double()
    assert weights.isfinite().all()
    assert (weights[40:, :40] == 0).all()
    assert weights[60, 45].item() == pytest.approx(torch.tensor(15 * -1e-3).exp().item(), rel=1e-6)
    assert weights[30, 25].item() == pytest.approx(torch.tensor(5 * -1e-3).exp().item(), rel=1e-6)


def test_sums_over_a_block():
    x = torch.arange(1.0, 5.0)[:, None]
    assert sum_from(x)[:, 0].tolist() == [10, 9, 7, 4]
    assert sum_before(x)[:, 0].tolist() == [0, 1, 3, 6]
