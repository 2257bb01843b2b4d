"""Layers under DistributedDataParallel and FSDP2, in two processes."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fulmen import nn

HIDDEN, RANKS = 16, 2
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch has no torch.distributed")


class Residual(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.norm, self.layer = nn.RMSNorm(HIDDEN), layer

    def forward(self, x):
        return x + self.layer(self.norm(x))


def model():
    torch.manual_seed(0)
    layers = (
        nn.GatedLinearAttention(HIDDEN, 2, conv_size=4),
        nn.GatedDeltaNet(HIDDEN, 2, key_size=8, value_size=8),
        nn.Mamba2(HIDDEN, head_dim=8, state_size=8),
        nn.KimiDeltaAttention(HIDDEN, 2, 8),
        nn.LightningAttention(HIDDEN, 2),
        nn.TensorProductAttention(HIDDEN, 2, 8),
        nn.OutputGatedAttention(HIDDEN, 2),
    )
    return torch.nn.Sequential(*(Residual(layer) for layer in layers))


def tokens():
    return torch.randn(2 * RANKS, 12, HIDDEN, generator=torch.Generator().manual_seed(1))


def train(made, x, steps=2):
    """The weights after some steps on the mean of squares."""
    optimizer = torch.optim.SGD(made.parameters(), lr=0.3)
    for _ in range(steps):
        optimizer.zero_grad()
        made(x).square().mean().backward()
        optimizer.step()
    return made


def whole(made):
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for name, p in made.named_parameters()}


def worker(rank, meeting, expected):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    try:
        x = tokens().chunk(RANKS)[rank]
        replicated = train(DistributedDataParallel(model()), x).module
        sharded = model()
        for layer in sharded:
            fully_shard(layer)
        fully_shard(sharded)
        for made in (replicated, train(sharded, x)):
            found = whole(made)
            assert found.keys() == expected.keys()
            for name, weight in expected.items():
                torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    finally:
        dist.destroy_process_group()


@pytest.mark.one_build
def test_data_parallel_and_sharded_training_is_training(tmp_path):
    before, made = whole(model()), train(model(), tokens())
    expected = whole(made)
    assert all(not torch.equal(expected[name], before[name]) for name in before)
    multiprocessing.spawn(worker, (tmp_path / "meeting", expected), nprocs=RANKS)
