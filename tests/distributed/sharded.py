"""Cases of the lab, run by the ranks of a group on their shards, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

WEIGHTS = torch.tensor([0.5, -0.25, 2.0, 0.125])  # of each rank's gradient of the final state, beside the first


def bounds_of(lengths: Sequence[int]) -> list[int]:
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def shares(world: int) -> Tensor:
    """What of the final state's gradient comes from each rank; in sum, one."""
    rest = WEIGHTS[: world - 1]
    return torch.cat([1 - rest.sum(0, keepdim=True), rest])


def has_tokens(name: str, x: Tensor) -> bool:
    return "state" not in name and x.ndim >= 3


def shard_of(name: str, x: Tensor, bounds: list[int], rank: int, packed: bool) -> Tensor | None:
    if name == "initial_state":
        return x if packed or rank == 0 else None
    return x[:, bounds[rank] : bounds[rank + 1]] if has_tokens(name, x) else x


def run(
    group: dist.ProcessGroup,
    operator: Callable[..., Any],
    tensors: dict[str, Tensor],
    lengths: Sequence[int],
    options: dict[str, Any],
    without: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """On one rank: both results and all gradients of its shard, by name."""
    rank, world, bounds = dist.get_rank(group), dist.get_world_size(group), bounds_of(lengths)
    packed = options.get("cu_seqlens") is not None
    mine = {name: shard_of(name, x, bounds, rank, packed) for name, x in tensors.items()}
    leaves = {n: x.clone().requires_grad_() for n, x in mine.items() if not n.startswith("grad_") and x is not None}
    output, state = operator(group=group, return_state=True, **leaves, **options)
    results = {"output": output, "state": state}
    share = shares(world)[rank].to(mine["grad_state"])
    cotangents = {"output": mine["grad_output"], "state": mine["grad_state"] * share}
    used = [name for name in results if name not in without]
    grads = torch.autograd.grad(
        [results[name] for name in used],
        list(leaves.values()),
        [cotangents[name].to(results[name].dtype) for name in used],
        allow_unused=True,
    )
    assert all(x is not None for x in grads), [n for n, x in zip(leaves, grads, strict=True) if x is None]
    return {name: x.detach() for name, x in results.items()} | {
        f"d{name}": x for name, x in zip(leaves, grads, strict=True)
    }


def together(parts: Sequence[dict[str, Tensor]], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The ranks' results as one call's: shards side by side, gradients of what all have summed."""
    for part in parts:
        if isinstance(part, Exception):
            raise part
    whole = {}
    for name in parts[0]:
        found = [part[name] for part in parts if name in part]
        of = "grad_output" if name == "output" else "grad_state" if name == "state" else name[1:]
        if has_tokens(of, tensors[of]):
            whole[name] = torch.cat(found, 1)
        elif name == "state":
            assert all(torch.equal(x, found[0]) for x in found), "ranks disagree on the final state"
            whole[name] = found[0]
        else:
            whole[name] = torch.stack(found).double().sum(0).to(found[0].dtype)  # the sum itself rounds once
    return whole


def splits(length: int, world: int) -> list[tuple[int, ...]]:
    """Ways to partition ``length`` tokens: alike, unlike, and with ranks that have none."""
    even = [b - a for a, b in pairwise(length * i // world for i in range(world + 1))]
    rest = length - 3
    uneven = {2: (3, rest), 3: (3, rest - 1, 1), 4: (2, 1, rest - 5, 5)}[world]
    empty = {2: (length, 0), 3: (0, 3, rest), 4: (rest, 0, 0, 3)}[world]
    return [tuple(even), uneven, empty]
