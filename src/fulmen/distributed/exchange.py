"""What goes over the wire: a group's ranks, one gathering of equal tensors, and an error that says what happened.

The engine is torch.distributed, with whatever backend the group has; nothing here knows which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Result = TypeVar("Result")
# torch 2.13 has a new name for it, and warns of the old one, which the versions before it have.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Ranks:
    """The ranks that hold a sequence, in the order of its shards, and which of them this process is.

    Args:
        group: a process group, or a DeviceMesh of one dimension.
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh) -> None:
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(
                    f"group must be a DeviceMesh of one dimension; got {group.ndim}, {group.mesh_dim_names}: pass one "
                    f"of them, mesh[name]"
                )
            group = group.get_group()
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"group must be a torch.distributed.ProcessGroup or a DeviceMesh of one dimension; got "
                f"{type(group).__name__} (all processes: torch.distributed.group.WORLD)"
            )
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("group must hold this process; it is not one of the group's ranks")

    def device_of_facts(self, like: object) -> torch.device:
        """Where numbers are exchanged that Python reads: on the CPU where the group has a backend for it, so that
        nobody waits for an accelerator; else where ``like`` is, if it is a tensor of a device that the group serves."""
        backends = str(dist.get_backend_config(self.group))  # "cpu:gloo,cuda:nccl"
        if "cpu:" in backends:
            return torch.device("cpu")
        served = torch.device(backends.split(":")[0])
        return like.device if isinstance(like, Tensor) and like.device.type == served.type else served


class Exchange(NamedTuple):
    """One meeting of the ranks: what they exchanged, and the bytes that each of them gave. Of a gathering, every rank
    receives those of all others."""

    what: str
    bytes: int


_records: list[list[Exchange]] = []


@contextmanager
def recorded() -> Iterator[list[Exchange]]:
    """The exchanges that this process begins while it lasts, in their order."""
    _records.append([])
    try:
        yield _records[-1]
    finally:
        _records.pop()


class Gathering:
    """A tensor of each rank, of one shape and dtype, on its way to all of them. :meth:`wait` gives ``[world, ...]``."""

    def __init__(self, x: Tensor, ranks: Ranks, what: str) -> None:
        self._ranks, self._what = ranks, what
        self._sent = x.contiguous()
        self._all = x.new_empty(ranks.world, *x.shape)
        self._work: Any = None
        if ranks.world == 1:
            self._all[0] = self._sent
        elif x.numel():
            _record(what, x)
            self._work = guarded(
                what,
                ranks,
                lambda: _all_gather(self._all.view(-1), self._sent.view(-1), group=ranks.group, async_op=True),
            )

    def wait(self) -> Tensor:
        if self._work is not None:
            guarded(self._what, self._ranks, self._work.wait)
            self._work = None
        return self._all


def summed(x: Tensor, ranks: Ranks, what: str) -> Tensor:
    """The sum over the ranks, on each of them; ``x`` is overwritten."""
    if ranks.world > 1 and x.numel():
        _record(what, x)
        guarded(what, ranks, lambda: dist.all_reduce(x, group=ranks.group))
    return x


def _record(what: str, x: Tensor) -> None:
    for record in _records:
        record.append(Exchange(what, x.nbytes))


def guarded(what: str, ranks: Ranks, communicate: Callable[[], Result]) -> Result:
    """``communicate()``; its failure says what was exchanged, by whom, and what may have happened."""
    try:
        return communicate()
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {ranks.rank} of {ranks.world} lost the others while exchanging {what}: a rank has ended, has failed "
            f"elsewhere, or did not come within the group's timeout ({error})"
        ) from error
