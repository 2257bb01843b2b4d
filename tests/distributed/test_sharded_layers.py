"""Layers whose sequence lies on several ranks: the same outputs, and gradients of weights that add up to the same."""

import pytest
import torch
import torch.distributed as dist

from distributed.sharded import bounds_of
from fulmen.lab.crew import Raised
from nn.layers import RECURRENT, gradients, layer, relative, tokens

LENGTHS = {2: (11, 26), 3: (20, 0, 17)}
TOKENS = 37


def sharded(group, name, lengths, cu_seqlens):
    """On one rank: its outputs, and its part of the weights' gradients."""
    rank, bounds = dist.get_rank(group), bounds_of(lengths)
    made, mine = layer(name, torch.float64), slice(bounds[rank], bounds[rank + 1])
    x = tokens(1, TOKENS, dtype=torch.float64)
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    y = made(x[:, mine], cu_seqlens=cu_seqlens, group=group)
    (y * weights[:, mine]).sum().backward()
    return y.detach(), {name: parameter.grad for name, parameter in made.named_parameters()}


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("world", LENGTHS)
def test_a_layer_on_several_ranks_is_the_layer(crew, name, world):
    packed = None if world == 2 else torch.tensor([0, 4, 30, TOKENS])
    made, x = layer(name, torch.float64), tokens(1, TOKENS, dtype=torch.float64)
    whole = gradients(made, lambda: made(x, cu_seqlens=packed))
    results = crew.run(world, sharded, name, LENGTHS[world], packed)
    assert relative(torch.cat([output for output, _ in results], 1), made(x, cu_seqlens=packed)) < 1e-10
    for weight, expected in whole.items():
        assert relative(sum(grads[weight] for _, grads in results), expected) < 1e-9, weight


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
