"""Sequence parallelism on this machine: one rank and two, of one thread each, and what their shards compute.

Strong: n tokens in all. Weak: n tokens on each rank. Every column runs in processes of its own, which hold their inputs
and are told to begin; the time is until all of them are done. Speedups are relative to a shard's own work, on two ranks
at once with nothing exchanged: what "2 ranks" falls short of it is the price of the exchange. What more ranks would do
is for `fulmen scaling`.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid

import fulmen
from fulmen.lab.bench.measure import keep_freed_memory, keeps_freed_memory
from fulmen.lab.bench.prepared import Prepared
from fulmen.lab.bench.suite import Column, Input, Preset, Sizes, Suite, Text, Work
from fulmen.lab.crew import Crew, Raised
from fulmen.lab.scaling import Layer

MOST = 2
DECAYS = {"head": "h", "token": "a", "channel": "c"}  # the input that has each form
Key = tuple[str, str]  # section and column
Compute = Callable[..., Sequence[Tensor]]
_calls: dict[Key, Callable[[], Sequence[Tensor]]] = {}  # of a rank: what it runs when told to


@cache
def _crew() -> Crew:
    crew = Crew(MOST)
    atexit.register(crew.close)  # or the interpreter waits for processes that wait for it
    return crew


# ---- on the ranks: from the shard's tensors, and the gradient of its output in training ------------------------------


def _operator(
    group: dist.ProcessGroup, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, g: Tensor | None = None
) -> list[Tensor]:
    """On the ranks of the group; on one rank, the local one."""
    from fulmen import distributed

    operator = partial(distributed.linear_attention, group=group)
    return _results(fulmen.linear_attention if dist.get_world_size(group) == 1 else operator, q, k, v, log_decay, g)


def _summary(group: dist.ProcessGroup, k: Tensor, v: Tensor, log_decay: Tensor) -> list[Tensor]:
    return [_shard(k, k, v, log_decay).summarise().state]


def _entering_gradient(
    group: dist.ProcessGroup, g: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor
) -> list[Tensor]:
    shard = _shard(q, k, v, log_decay)
    gradient, kept = shard.backward()
    return [gradient(g, None, shard.new_states(shard.states).zero_(), *kept)]


def _work(
    group: dist.ProcessGroup, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, g: Tensor | None = None
) -> list[Tensor]:
    """All that a shard computes."""
    _summary(group, k, v, log_decay)
    if g is not None:
        _entering_gradient(group, g, q, k, v, log_decay)
    return _results(fulmen.linear_attention, q, k, v, log_decay, g)


def _shard(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Any:
    """One that a state enters and leaves."""
    from fulmen import distributed

    place = distributed.whole_place(rank=1, tokens=q.shape[1])
    return distributed.AttentionShard(q, k, v, log_decay, None, None, None, "auto", "auto", place)


def _results(
    operator: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, g: Tensor | None = None
) -> Any:
    """The output; in training, all gradients."""
    leaves = [x.detach().requires_grad_(g is not None) for x in (q, k, v, log_decay)]
    output = operator(*leaves[:3], log_decay=leaves[3])
    return [output] if g is None else torch.autograd.grad(output, leaves, g)


def _joined(results: Sequence[Tensor]) -> Tensor:
    """What belongs to tokens, ``[B, N, H, all channels]``, or a state."""
    return torch.cat([x if x.ndim == 4 else x[..., None] for x in results if x.ndim > 1], -1)


def _begin(
    group: dist.ProcessGroup, key: Key, compute: Compute, shards: list[tuple[Tensor, ...]], keeps: bool
) -> tuple[torch.Size, dict[str, int]]:
    """Take this rank's shard, and say of what shape the result is and how many bytes each exchange brought here.
    ``keeps``: freed memory, as the process that measures does."""
    from fulmen import distributed

    if keeps:
        keep_freed_memory()
    if any(section != key[0] for section, _ in _calls):
        _calls.clear()  # a section is measured as a whole, and its tensors are large
    _calls[key] = partial(compute, group, *shards[dist.get_rank(group)])
    with distributed.recorded() as exchanges:
        shape = _joined(_calls[key]()).shape
    others = dist.get_world_size(group) - 1
    return shape, {exchange.what: exchange.bytes * others for exchange in exchanges}


def _write(group: dist.ProcessGroup, key: Key, results: list[Tensor]) -> None:
    results[dist.get_rank(group)].copy_(_joined(_calls[key]()))


def _go(group: dist.ProcessGroup, key: Key) -> None:
    _calls[key]()


# ---- here ------------------------------------------------------------------------------------------------------------


def _shards(world: int, weak: bool, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Of each rank; a decay of heads is on all of them."""
    from fulmen import distributed

    def parts(x: Tensor) -> Sequence[Tensor]:
        return [x] * world if weak or x.ndim == 1 else x.split(distributed.shard_lengths(x.shape[1], world), 1)

    return list(zip(*map(parts, tensors), strict=True))


def _prepare(key: Key, world: int, weak: bool, compute: Compute, *tensors: Tensor) -> Callable[[], Tensor]:
    if type(tensors[0]) is not Tensor:  # a fake one: a rehearsal, of what is held here
        return lambda: torch.empty_like(tensors[0])
    given = [x.detach().clone().share_memory_() for x in tensors]
    begun = _done(_crew().run(world, _begin, key, compute, _shards(world, weak, given), keeps_freed_memory()))
    for _, received in begun:
        _check_received(received, world, tensors)
    results = [torch.empty(shape, dtype=torch.float32).share_memory_() for shape, _ in begun]
    _done(_crew().run(world, _write, key, results))
    found = torch.cat(results, 1)

    def run() -> Tensor:
        _done(_crew().run(world, _go, key))
        return found

    return run


def _check_received(received: dict[str, int], world: int, tensors: Sequence[Tensor]) -> None:
    """What came from the other ranks is what the formula says, or no column is timed."""
    if not received:
        return
    q, _, v, log_decay = tensors[:4]
    layer = Layer(q.shape[0], q.shape[2], q.shape[3], v.shape[3], log_decay.shape[3] if log_decay.ndim == 4 else 1)
    expected = {"the states": layer.forward(world), "the gradients": layer.backward(world)}
    for what, least in expected.items():
        found = received.get(f"{what} of linear_attention", least)
        if found != least:
            raise RuntimeError(f"a rank received {found} bytes of {what}, not {least} as the formula has it")


def _done(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, Raised):
            raise result
    return results


def _exact(compute: Compute, world: int, weak: bool, together: bool, *tensors: Tensor) -> Tensor:
    """Of the ranks' tokens ``together``, or of each rank's shard on its own."""
    shards = _shards(world, weak, tensors)
    if together:
        shards = [tuple(x[0] if x[0].ndim == 1 else torch.cat(x, 1) for x in zip(*shards, strict=True))]
    return torch.cat([_joined(compute(*shard)) for shard in shards], 1).detach()


_reference = partial(fulmen.linear_attention, backend="reference")


def _exact_summary(k: Tensor, v: Tensor, log_decay: Tensor) -> list[Tensor]:
    return [_reference(k, k, v, log_decay=log_decay, return_state=True)[1]]


def _exact_entering_gradient(g: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> list[Tensor]:
    entering = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]).requires_grad_()
    output = _reference(q, k, v, log_decay=log_decay, initial_state=entering)
    return list(torch.autograd.grad(output, entering, g))


class Part(NamedTuple):
    """What the ranks of a column compute, each of its shard; ``exact`` is the same by the specification, of the tokens
    of all ranks ``together`` or of each shard on its own."""

    name: str
    about: str
    pros: str
    cons: str
    takes: tuple[str, ...]
    world: int
    compute: Compute
    exact: Compute
    together: bool = False

    def column(self, section: str, weak: bool) -> Column:
        function = Prepared(partial(_prepare, (section, self.name), self.world, weak, self.compute))
        exact = partial(_exact, self.exact, self.world, weak, self.together)
        title, about = f"Fulmen, {self.name}", f"{self.about}, one thread each"
        return Column(self.name, title, about, self.pros, self.cons, self.takes, function, exact, _least)


def _columns(section: str, decay: str, training: bool, weak: bool) -> tuple[Column, ...]:
    inputs, exact = ("q", "k", "v", DECAYS[decay]), partial(_results, _reference)
    takes = (*inputs, "g") if training else inputs
    several, whole = f"{MOST} ranks", "fulmen.distributed.linear_attention"
    work = f"operator, summary{' and entering gradient' if training else ''} of a shard"
    parts = [
        Part("1 rank", "the local operator", "Nothing is exchanged", "One process", takes, 1, _operator, exact),
        Part(several, whole, "Any length", "A summary more to compute", takes, MOST, _operator, exact, together=True),
        Part("shard's work", work, "Nothing is exchanged", "Not the result", takes, MOST, _work, exact),
        Part("summary", "of a shard", "No outputs", "A part of it", inputs[1:], MOST, _summary, _exact_summary),
    ]
    if training:
        name, about, takes = "entering gradient", "of the state that enters a shard", ("g", *inputs)
        cells = takes, MOST, _entering_gradient, _exact_entering_gradient
        parts.append(Part(name, about, "No other gradients", "A part of it", *cells))
    return tuple(part.column(section, weak) for part in parts)


def _sections() -> dict[str, tuple[Column, ...]]:
    kinds = [(False, decay) for decay in DECAYS] + [(True, "token")]
    found = {}
    for weak, decay in kinds:
        for training in (False, True):
            name = f"{'weak' if weak else 'strong'} {'training' if training else 'forward'} {decay}"
            found[name] = _columns(name, decay, training, weak)
    return found


def _least(sizes: Sizes, n: int) -> Mapping[str, Work]:
    return {}  # processes have no roofline here


SIZES, N = Sizes(1, 4, 64), 65536
_measured = Preset((SIZES,), (16384, N))


def _received() -> tuple[str, ...]:
    """By formula, in bytes: ours is counted and compared with it before a column is timed."""
    layer = Layer(SIZES.batch, SIZES.heads, SIZES.dim, SIZES.dim, decay=1, itemsize=4)
    at = f"H = {SIZES.heads}, D = {SIZES.dim}, float32, {MOST} ranks: a rank receives"
    return (
        f"{at} {layer.forward(MOST):,} bytes forward (token) and {layer.backward(MOST):,} backward, whatever n is",
        f"{at} {layer.ring(N, MOST):,} bytes in ring attention's forward at n = {N}",
        f"{at} {layer.all_to_all(N, MOST):,} bytes forward at n = {N} where heads are exchanged for tokens",
    )


SUITE = Suite(
    name="sp",
    about="sequence parallelism: linear attention on 1 and 2 ranks of one thread, and what a shard computes",
    text=Text(
        title="Sequence parallelism",
        subject="One rank and two, of one thread each, with n tokens in all (strong) or on each rank (weak), against "
        "what a shard computes with nothing exchanged.",
        algorithm="fulmen.distributed.linear_attention",
        formula="S_out = T S_in + S for each shard, gathered once each way",
        complexity=("linear in n", *_received()),
    ),
    axis="n",
    baseline="shard's work",
    modes=("fwd",),
    sections=_sections(),
    inputs={
        **{name: Input("B N H D") for name in ("q", "k", "v", "g")},
        "h": Input("H", lambda x: logsigmoid(x + 4)),
        "a": Input("B N H", lambda x: logsigmoid(x + 4)),
        "c": Input("B N H D", lambda x: logsigmoid(x + 4)),
    },
    presets={
        "published": _measured,  # none is; every suite has this preset
        "laptop": _measured,
        "quick": Preset((SIZES,), (4096,), ("strong forward token", "strong training token")),
    },
    check_sizes=lambda sizes: Sizes(sizes.batch, 2, 16),
    memory_columns=(),  # of other processes, which torch does not see here
)
