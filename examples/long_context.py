"""One training step on a sequence that is longer than one process has memory for, over the ranks of torchrun.

    torchrun --nproc-per-node 2 examples/long_context.py --tokens 65536 --memory 600

Each process is given a limit of memory (`--memory`, in MiB, beyond what it holds when it begins; Linux). Alone, it says
that the tokens do not fit. On two ranks each holds half of them, and what they exchange for each layer does not grow
with them: a state forward, its gradient backward, and three tokens of the convolution.
"""

import argparse
import os
import resource
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid, silu

import fulmen.distributed as fd

VOCABULARY, HIDDEN, HEADS, WIDTH = 256, 128, 2, 4


class Layer(nn.Module):
    """A short convolution and linear attention with a decay per token, on this rank's shard of the sequence."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.into = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.decay = nn.Linear(HIDDEN, HEADS)
        self.taps = nn.Parameter(torch.randn(3 * HIDDEN, WIDTH) / 2)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        mixed = fd.causal_conv1d(self.into(x), self.taps, activation="silu", group=self.group)
        q, k, v = mixed.unflatten(-1, (3, HEADS, -1)).unbind(2)
        log_decay = logsigmoid(self.decay(x) + 6)
        read = fd.linear_attention(q, k, v, log_decay=log_decay, group=self.group)
        return x + self.out(silu(read.flatten(2)))


def limit_memory(mebibytes: int) -> None:
    """What this process holds now, and so much more."""
    with open("/proc/self/status") as file:
        held = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (held + mebibytes * 2**20, resource.RLIM_INFINITY))


def part_of_loss(model: nn.Module, tokens: Tensor, following: Tensor, total: int) -> Tensor:
    """This rank's part of the mean over the tokens of all ranks."""
    return cross_entropy(model(tokens).flatten(0, 1), following.flatten(), reduction="sum") / total


def train_step(model: nn.Module, tokens: Tensor, following: Tensor, total: int, rate: float = 1e-3) -> Tensor:
    """One step of gradient descent."""
    loss = part_of_loss(model, tokens, following, total)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # each rank has its part, as in data parallel training
            parameter -= rate * parameter.grad
            parameter.grad = None
    return loss.detach()


def out_of_memory(error: Exception) -> bool:
    """And not, for instance, a rank that has lost the others."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in ("can't allocate", "bad_alloc"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--memory", type=int, default=600, help="MiB for each process")
    options = parser.parse_args()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)  # without torchrun, one rank
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), Layer(group), Layer(group), nn.Linear(HIDDEN, VOCABULARY))
    lengths = fd.shard_lengths(options.tokens, dist.get_world_size())
    few = torch.zeros(1, 8, dtype=torch.long)
    train_step(model, few, few, 8, rate=0.0)  # so that all threads and connections are there before the limit is
    limit_memory(options.memory)
    positions = torch.arange(sum(lengths[:rank]), sum(lengths[: rank + 1]) + 1)
    text = (positions * positions // 7 % VOCABULARY)[None]
    batch = text[:, :-1], text[:, 1:], options.tokens
    try:
        before = train_step(model, *batch)
        with torch.no_grad():
            losses = torch.stack([before, part_of_loss(model, *batch)])
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        print(f"rank {rank}: {lengths[rank]} tokens do not fit into {options.memory} MiB ({str(error)[:80]})")
        return 1
    dist.all_reduce(losses)
    if rank == 0:
        where = f"{options.tokens} tokens on {len(lengths)} ranks of {options.memory} MiB"
        print(f"{where}: loss {losses[0]:.5f}, and {losses[1]:.5f} after one step")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
