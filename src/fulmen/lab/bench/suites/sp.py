"""Sequence parallelism on this machine: one rank and two, of one thread each, strong and weak.

Strong: n tokens in all. Weak: n tokens on each rank. Every column runs in processes of its own, which hold their inputs
and are told to begin; the time is until all of them are done. What is sent, and what more ranks would do, is for
`fulmen scaling`.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid

import fulmen
from fulmen.lab.bench.measure import keep_freed_memory
from fulmen.lab.bench.prepared import Prepared
from fulmen.lab.bench.suite import Column, Input, Preset, Sizes, Suite, Text, Work
from fulmen.lab.crew import Crew, Raised

TAKES = ("q", "k", "v", "a", "g")
MOST = 2
_calls: dict[tuple[int, bool, bool], Callable[[], object]] = {}  # of a rank: what it runs when told to


@cache
def _crew() -> Crew:
    crew = Crew(MOST)
    atexit.register(crew.close)  # or the interpreter waits for processes that wait for it
    return crew


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def _begin(group: dist.ProcessGroup, what: tuple[int, bool, bool], tensors: dict[str, Tensor], output: Tensor) -> None:
    """Take this rank's shard, and write once what it makes of it."""
    from fulmen import distributed

    keep_freed_memory()
    world, training, weak = what
    shards = {name: x if weak else distributed.shard(x, group=group).contiguous() for name, x in tensors.items()}
    cotangent = shards.pop("g")
    leaves = [x.clone().requires_grad_(training) for x in shards.values()]

    def call() -> Tensor:
        q, k, v, a = leaves
        if world == 1:
            y = fulmen.linear_attention(q, k, v, log_decay=a)
        else:
            y = distributed.linear_attention(q, k, v, log_decay=a, group=group)
        return torch.autograd.grad(y, leaves, cotangent)[0] if training else y

    _calls[what] = call
    found = call().detach()
    if not weak:
        distributed.shard(output, group=group).copy_(found)
    elif dist.get_rank(group) == 0:
        output.copy_(found)


def _go(group: dist.ProcessGroup, what: tuple[int, bool, bool]) -> None:
    _calls[what]()


# ---- here ------------------------------------------------------------------------------------------------------------


def _prepare(world: int, training: bool, weak: bool, *tensors: Tensor) -> Callable[[], Tensor]:
    output = torch.empty_like(tensors[0 if training else 2])
    if type(output) is not Tensor:  # a fake one: a rehearsal, of what is held here
        return lambda: output
    output.share_memory_()
    given = {name: x.detach().clone() for name, x in zip(TAKES, tensors, strict=True)}
    what = world, training, weak
    _done(_crew().run(world, _begin, what, given, output))

    def run() -> Tensor:
        _done(_crew().run(world, _go, what))
        return output

    return run


def _done(results: list[Any]) -> None:
    for result in results:
        if isinstance(result, Raised):
            raise result


def _exact(training: bool, q: Tensor, k: Tensor, v: Tensor, a: Tensor, g: Tensor) -> Tensor:
    q = q.detach().requires_grad_(training)
    with torch.set_grad_enabled(training):
        y = fulmen.linear_attention(q, k, v, log_decay=a, backend="reference")
    return torch.autograd.grad(y, q, g)[0] if training else y


def _column(world: int, training: bool, weak: bool) -> Column:
    name = "1 rank" if world == 1 else f"{world} ranks"
    about = "the local operator" if world == 1 else "fulmen.distributed.linear_attention"
    pros, cons = ("Nothing is exchanged", "One process") if world == 1 else ("Any length", "A summary more to compute")
    function, exact = Prepared(partial(_prepare, world, training, weak)), partial(_exact, training)
    return Column(name, f"Fulmen, {name}", f"{about}, one thread each", pros, cons, TAKES, function, exact, _least)


def _least(sizes: Sizes, n: int) -> Mapping[str, Work]:
    return {}  # processes have no roofline here


SUITE = Suite(
    name="sp",
    about="sequence parallelism: linear attention with a decay per token on 1 and 2 ranks of one thread",
    text=Text(
        title="Sequence parallelism",
        subject="One rank and two, of one thread each, with n tokens in all (strong) and on each rank (weak).",
        algorithm="fulmen.distributed.linear_attention",
        formula="S_out = T S_in + S for each shard, gathered once each way",
        complexity=("linear in n", "what is sent does not depend on n"),
    ),
    axis="n",
    baseline="1 rank",
    modes=("fwd",),
    sections={
        f"{'weak' if weak else 'strong'} {'training' if training else 'forward'}": tuple(
            _column(world, training, weak) for world in range(1, MOST + 1)
        )
        for weak in (False, True)
        for training in (False, True)
    },
    inputs={
        **{name: Input("B N H D") for name in ("q", "k", "v", "g")},
        "a": Input("B N H", lambda x: logsigmoid(x + 4)),
    },
    presets={
        "published": Preset((Sizes(1, 4, 64),), (16384, 65536)),
        "laptop": Preset((Sizes(1, 4, 64),), (16384, 65536)),
        "quick": Preset((Sizes(1, 4, 64),), (4096,)),
    },
    check_sizes=lambda sizes: Sizes(sizes.batch, 2, 16),
    memory_columns=(),  # of other processes, which torch does not see here
)
