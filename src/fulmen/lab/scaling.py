"""What sequence parallelism sends, and a simulation of how it scales to ranks that are not here.

Bytes are by formula; on request, ours are also counted in real processes, side by side with it. Times are
**simulated**, from a link, a rate of compute and the measured cost of a summary, which are all inputs: no such machine
was used. Forward pass of one layer:

- ours: a shard's work and its summary, one gathering of B·H·(D·E + decay) floats from each rank, and a fold of them;
- ring attention (softmax): half of all pairs, and keys and values passed from rank to rank while it computes;
- all-to-all: linear attention of whole sequences on some of the heads, with q, k, v and o exchanged; at most H ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fulmen.lab.arguments import output_file, positive, whole
from fulmen.lab.crew import Crew, Raised

RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS = (1_000_000, 10_000_000, 100_000_000)


class Layer(NamedTuple):
    """Sizes of a call. ``decay`` is how many numbers a head's total decay has; ``itemsize`` is of q, k and v."""

    batch: int = 1
    heads: int = 32
    key_size: int = 128
    value_size: int = 128
    decay: int = 1
    itemsize: int = 2

    def forward(self, world: int) -> int:
        """Bytes that a rank receives in our forward, whatever the length: of each other rank, a state and a decay."""
        return 4 * self.batch * self.heads * (self.key_size * self.value_size + self.decay) * (world - 1)

    def backward(self, world: int) -> int:
        """Bytes that a rank receives in our backward: of each other rank, the gradient of a state."""
        return 4 * self.batch * self.heads * self.key_size * self.value_size * (world - 1)

    def ring(self, tokens: int, world: int) -> int:
        """Bytes that a rank receives in ring attention's forward: keys and values of all others."""
        row = self.batch * self.heads * (self.key_size + self.value_size) * self.itemsize
        return tokens // world * row * (world - 1)

    def all_to_all(self, tokens: int, world: int) -> int:
        """Bytes that a rank receives where heads are exchanged for tokens: q, k, v, and the output back."""
        row = self.batch * self.heads * 2 * (self.key_size + self.value_size) * self.itemsize
        return tokens // world * row * (world - 1) // world


@dataclass(frozen=True)
class Machine:
    """One rank, and the link between ranks. All of it is assumed."""

    link: float = 25e9  # bytes per second
    latency: float = 5e-6  # seconds for each message of a ring
    flops: float = 200e12  # of products, per second
    memory: float = 2e12  # bytes per second
    summary: float = 0.37  # of a forward: what a summary takes (on a CPU, docs/distributed.md)

    def ours(self, layer: Layer, tokens: int, world: int) -> float:
        work = self._linear(layer, tokens, layer.heads) / world
        if world == 1:
            return work
        exchange = (world - 1) * self.latency + layer.forward(world) / self.link
        return work * (1 + self.summary) + exchange + 2 * layer.forward(world) / self.memory

    def ring(self, layer: Layer, tokens: int, world: int) -> float:
        work = 2 * layer.batch * layer.heads * tokens**2 * (layer.key_size + layer.value_size) / 2 / world / self.flops
        return max(work, (world - 1) * self.latency + layer.ring(tokens, world) / self.link)

    def all_to_all(self, layer: Layer, tokens: int, world: int) -> float | None:
        if world > layer.heads:
            return None
        work = self._linear(layer, tokens, layer.heads / world)
        return work + (0 if world == 1 else 2 * self.latency * world + layer.all_to_all(tokens, world) / self.link)

    def _linear(self, layer: Layer, tokens: int, heads: float) -> float:
        """By products with chunks of 128 tokens, or by reading q, k, v and writing o, whichever takes longer."""
        sizes = 2 * layer.key_size * layer.value_size + 128 * (layer.key_size + layer.value_size)
        products = 2 * layer.batch * heads * tokens * sizes / self.flops
        moved = layer.batch * heads * tokens * 2 * (layer.key_size + layer.value_size) * layer.itemsize / self.memory
        return max(products, moved)


def simulated(layer: Layer, machine: Machine) -> list[dict[str, Any]]:
    """Seconds and bytes of each way, for each number of ranks and tokens."""
    return [
        {
            "tokens": tokens,
            "ranks": world,
            "ours": machine.ours(layer, tokens, world),
            "all-to-all": machine.all_to_all(layer, tokens, world),
            "ring": machine.ring(layer, tokens, world),
            "ours bytes": layer.forward(world),
            "all-to-all bytes": layer.all_to_all(tokens, world) if world <= layer.heads else None,
            "ring bytes": layer.ring(tokens, world),
        }
        for tokens in TOKENS
        for world in RANKS
    ]


def counted(layer: Layer, worlds: Sequence[int] = (2, 3, 4), tokens: int = 4096) -> list[dict[str, Any]]:
    """Bytes that a rank receives in each exchange of one call, counted in processes of this machine, and by formula;
    they are the same on every rank."""
    crew = Crew(max(worlds))
    try:
        return [_counted(crew, layer, world, tokens) for world in worlds]
    finally:
        crew.close()


def _counted(crew: Crew, layer: Layer, world: int, tokens: int) -> dict[str, Any]:
    first, *others = crew.run(world, _received, layer, tokens)
    if isinstance(first, Raised):
        raise first
    if any(other != first for other in others):
        raise RuntimeError(f"ranks count different bytes: {[first, *others]}")
    agreement, forward, backward = first
    return {
        "tokens": tokens,
        "ranks": world,
        "agreement, counted": agreement,
        "forward, counted": forward,
        "forward, formula": layer.forward(world),
        "backward, counted": backward,
        "backward, formula": layer.backward(world),
        "ring, formula": layer.ring(tokens, world),
        "all-to-all, formula": layer.all_to_all(tokens, world) if world <= layer.heads else None,
    }


def _received(group: dist.ProcessGroup, layer: Layer, tokens: int) -> list[int]:
    """On a rank: the bytes of each exchange of a forward and a backward, from all others."""
    from fulmen import distributed

    lead = layer.batch, distributed.shard_lengths(tokens, dist.get_world_size(group))[dist.get_rank(group)], layer.heads
    q, k = (torch.zeros(*lead, layer.key_size).requires_grad_() for _ in range(2))
    v = torch.zeros(*lead, layer.value_size).requires_grad_()
    decays = {0: None, 1: torch.zeros(lead), layer.key_size: torch.zeros_like(k)}
    with distributed.recorded() as exchanges:
        distributed.linear_attention(q, k, v, log_decay=decays[layer.decay], group=group).sum().backward()
    return [exchange.bytes * (dist.get_world_size(group) - 1) for exchange in exchanges]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""

    def cell(name: str, value: float | None) -> str:
        if value is None:
            return "-"
        if name.endswith("bytes"):
            return f"{value / 1e6:,.1f} MB"
        return f"{value:,}" if isinstance(value, int) else f"{value * 1e3:,.2f} ms"

    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    lines += [f"| {' | '.join(cell(name, row[name]) for name in names)} |" for row in rows]
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure  # not pyplot: it keeps figures and may look for a display

    figure = Figure(figsize=(10, 4.4), dpi=120, layout="constrained")
    for axes, tokens in zip(figure.subplots(1, len(TOKENS), sharey=True), TOKENS, strict=True):
        for way in ("ours", "all-to-all", "ring"):
            points = [(row["ranks"], row[way]) for row in rows if row["tokens"] == tokens and row[way] is not None]
            axes.loglog(*zip(*points, strict=True), marker=".", label=way)
        axes.set_title(f"{tokens / 1e6:g} million tokens")
        axes.set_xlabel("ranks")
        axes.grid(alpha=0.4)
    figure.axes[0].set_ylabel("seconds, simulated")
    figure.axes[0].legend()
    figure.savefig(path)


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "scaling", help="simulate sequence parallelism on up to 1024 ranks; count bytes on 2 to 4"
    )
    for name, value in vars(Machine()).items():
        parser.add_argument(f"--{name}", type=positive, default=value, help=f"assumed (default {value:g})")
    for name, size in Layer()._asdict().items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=whole, default=size, help=f"of the layer (default {size})"
        )
    parser.add_argument(
        "--count", action="store_true", help="also count what 2, 3 and 4 processes of this machine receive"
    )
    parser.add_argument("--plot", type=output_file, help="write a plot to this file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    layer = Layer(**{name: getattr(options, name) for name in Layer._fields})
    machine = Machine(**{name: getattr(options, name) for name in vars(Machine())})
    rows = simulated(layer, machine)
    print(f"Simulated, not measured; bytes by formula: {layer}, {machine}\n\n{table(rows)}")
    if options.count:
        print("\nBytes that a rank receives; float32, counted in processes of this machine:\n")
        print(table(counted(layer._replace(itemsize=4))))
    if options.plot is not None:
        plot(rows, options.plot)
        print(f"\nwrote {options.plot}")
