"""Layers whose sequence lies on several ranks: the same outputs, and gradients of weights that add up to the same."""

import pytest
import torch
import torch.distributed as dist

from distributed.sharded import bounds_of
from fulmen.lab.crew import Raised
from nn.layers import RECURRENT, gradients, layer, tokens

LENGTHS = {1: (37,), 2: (11, 26), 3: (20, 0, 17), 4: (9, 2, 15, 11)}
TOKENS = 37


def sharded(group, name, lengths, cu_seqlens, dtype):
    """On one rank: its outputs, and its part of the weights' gradients."""
    rank, bounds = dist.get_rank(group), bounds_of(lengths)
    made, mine = layer(name, dtype), slice(bounds[rank], bounds[rank + 1])
    x = tokens(1, TOKENS, dtype=dtype)
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(dtype)
    y = made(x[:, mine], cu_seqlens=cu_seqlens, group=group)
    (y * weights[:, mine]).sum().backward()
    return y.detach(), {name: parameter.grad for name, parameter in made.named_parameters()}


def distance(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def errors(crew, name, world, dtype):
    """How far the ranks are from one process in float64, of the output and of each weight's gradient, in parts of its
    norm."""
    packed = None if world == 2 else torch.tensor([0, 4, 30, TOKENS])
    made, x = layer(name, torch.float64), tokens(1, TOKENS, dtype=torch.float64)
    whole = gradients(made, lambda: made(x, cu_seqlens=packed))
    results = crew.run(world, sharded, name, LENGTHS[world], packed, dtype)
    output = distance(torch.cat([output for output, _ in results], 1), made(x, cu_seqlens=packed))
    return output, {
        weight: distance(sum(grads[weight].double() for _, grads in results), expected)
        for weight, expected in whole.items()
    }


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("world", LENGTHS)
def test_a_layer_on_several_ranks_is_the_layer(crew, name, world):
    output, weights = errors(crew, name, world, torch.float64)
    assert output < 1e-10
    assert max(weights.values()) < 1e-9, weights


@pytest.mark.parametrize("name", RECURRENT)
def test_in_float32(crew, name):
    """On the backends that train: float64 has none in the core."""
    output, weights = errors(crew, name, 3, torch.float32)
    assert output < 1e-5
    assert max(weights.values()) < 1e-4, weights


@pytest.mark.parametrize("name", RECURRENT)
def test_in_bfloat16(crew, name):
    """As close to float64 as one process is."""
    (several, weights), (one, of_one) = (errors(crew, name, world, torch.bfloat16) for world in (3, 1))
    assert several <= 1.5 * one
    assert all(error <= 1.5 * of_one[weight] for weight, error in weights.items()), (weights, of_one)


def refused_by_one(group):
    hidden = 5 if dist.get_rank(group) == 1 else 24
    return layer("Mamba2")(torch.zeros(1, 7, hidden), group=group)


def test_what_one_rank_refuses_the_others_learn(crew):
    """A layer checks its tokens before the ranks first meet."""
    why = "x must have shape [B, N, 24]; got [1, 7, 5]"
    first, second, third = crew.run(3, refused_by_one)
    assert second.message == why
    for found in (first, third):
        assert f"rank 1 refused its arguments: ValueError: {why}" in found.message


def test_what_a_shard_cannot_have_is_refused(crew):
    for error in crew.run(2, refused):
        assert not isinstance(error, Raised), error
        assert error == [
            "group must be None: tensor-product attention needs all tokens of a sequence in one process",
            "group must be None with a cache or an attention_mask: a shard has neither",
        ]


def refused(group):
    found = []
    for name, options in (
        ("TensorProductAttention", {}),
        ("GatedDeltaNet", {"attention_mask": torch.ones(1, 5)}),
    ):
        with pytest.raises(ValueError, match="group") as error:
            layer(name)(tokens(1, 5), group=group, **options)
        found.append(str(error.value))
    return found
