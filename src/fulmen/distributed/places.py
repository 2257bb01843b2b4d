"""Where a shard lies in the whole: which packed sequences it holds, and what enters and leaves it.

Ranks hold consecutive shards of tokens, of any lengths, in the order of their rank. At most one sequence enters a shard
(its first tokens) and at most one leaves it (its last tokens), however many there are: so what is exchanged is one
state for each rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class Place(NamedTuple):
    """One shard of the whole.

    Attributes:
        tokens: how many it has.
        enters: whether its first sequence began on an earlier rank.
        head: the tokens of that sequence here; 0 if none enters.
        tail: the first token of its last sequence, if that leaves; else ``tokens``.
        leaves: whether anybody needs the state after its last sequence, which goes on on a later rank, or is requested.
        bounds: where its sequences begin, and ``tokens``: its own ``cu_seqlens``; None if nothing is packed.
        begun: which of all sequences begin here, the first and past the last. Before them stands the one that enters;
            a shard that has neither has one of no tokens in its place.
        ended: of each sequence that ends here, its number among all, and here.
    """

    tokens: int
    enters: bool
    head: int
    tail: int
    leaves: bool
    bounds: tuple[int, ...] | None = None
    begun: tuple[int, int] = (0, 0)
    ended: tuple[tuple[int, int], ...] = ()

    @property
    def through(self) -> bool:
        """Whether a state that enters also leaves."""
        return self.enters and self.leaves and self.tail == 0

    @property
    def carried(self) -> int:
        """How many of its packed sequences, 0 or 1, did not begin here."""
        return len(self.bounds or ()) - 1 - (self.begun[1] - self.begun[0])

    def cu_seqlens(self, like: Tensor) -> Tensor:
        """Its own, in the dtype and on the device of ``like``."""
        return torch.tensor(self.bounds, dtype=like.dtype, device=like.device)


def whole_place(rank: int, tokens: int, leaves: bool = True) -> Place:
    """A shard of a sequence that is not packed (or of a batch of them)."""
    return Place(tokens, enters=rank > 0, head=tokens if rank > 0 else 0, tail=0 if leaves else tokens, leaves=leaves)


def packed_places(lengths: Sequence[int], bounds: Sequence[int]) -> list[Place]:
    """The shards of packed sequences: ``lengths`` of the shards, ``bounds`` the values of the global ``cu_seqlens``."""
    starts = [0, *accumulate(lengths)]
    if bounds[-1] != starts[-1]:
        raise ValueError(
            f"cu_seqlens must end at the number of tokens of all ranks, {starts[-1]} ({' + '.join(map(str, lengths))});"
            f" got {bounds[-1]}"
        )
    # Of several shards that start there, a sequence begins on the last: the others have no tokens.
    begins_on = [bisect_right(starts, bound, hi=len(lengths)) - 1 for bound in bounds[:-1]]
    places = []
    for rank, tokens in enumerate(lengths):
        start, stop = starts[rank], starts[rank + 1]
        first, last = bisect_right(begins_on, rank - 1), bisect_right(begins_on, rank)
        # The sequence before them, if it has tokens left; a shard without any sequence hands on what enters it.
        enters = first > 0 and (bounds[first] > start or first == last)
        carried = 1 if enters or first == last else 0
        local = [0] * carried + [bounds[i] - start for i in range(first, last)] + [tokens]
        ended = [(i, i - first + carried) for i in range(first, last) if bounds[i + 1] <= stop]
        if enters and start < bounds[first] <= stop:
            ended.insert(0, (first - 1, 0))
        head, leaves = local[1] if enters else 0, bounds[last] > stop
        tail = local[-2] if leaves else tokens
        places.append(Place(tokens, enters, head, tail, leaves, tuple(local), (first, last), tuple(ended)))
    return places
