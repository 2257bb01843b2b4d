"""What the ranks must agree on before they exchange states, and an error on every rank, by name, where they do not.

Each call begins with one small gathering of fixed size: it cannot be left out on one rank and not on another, which a
memory of earlier calls could not promise (two ranks may make different calls that were both made before). It carries
what may differ between ranks, such as the length of the shard, and a digest of what must not. Only where digests
differ, or a rank refuses its own arguments, the ranks also exchange the facts themselves, as text.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fulmen.distributed.exchange import Gathering, Ranks
from fulmen.distributed.places import Place, packed_places, whole_place
from fulmen.ops.chunks.decay_form import DecayForm
from fulmen.ops.chunks.sequences import packed_bounds

_TEXT = 4096  # bytes of a rank's facts as text
Facts = Mapping[str, Any]


class Call(NamedTuple):
    """What one rank brings to an operator.

    Attributes:
        facts: what must be the same on all ranks, by name.
        tokens: of the shard.
        differentiates: whether a gradient may be requested from this rank.
        initial: 0 without an initial state; else 1, and the width of a convolution's.
        bounds: the values of the global ``cu_seqlens``; None if nothing is packed.
        returns_state: whether the final state is requested, on all ranks alike.
    """

    facts: Facts
    tokens: int
    differentiates: bool
    initial: int = 0
    bounds: list[int] | None = None
    returns_state: bool = False


class Agreement:
    """The calls of all ranks, on their way to each other. Asking for any of them waits for all, and raises on every
    rank the same error where they do not fit together.

    Args:
        like: one of the operator's tensors, or what the caller gave for one.
        described: gives this rank's call, or raises where its arguments are wrong.
    """

    def __init__(self, operator: str, ranks: Ranks, like: Tensor, described: Callable[[], Call]) -> None:
        self.operator, self.ranks = operator, ranks
        self._device = ranks.device_of_facts(like)
        try:
            self.call, self.device = described(), like.device
            alike = {"operator": operator, "the device": self.device.type, "return_state": self.call.returns_state}
            self._text = json.dumps(alike | dict(self.call.facts))
        except Exception as error:  # whatever it is: the others wait
            self._text = json.dumps({"refused": f"{type(error).__name__}: {error}"})
            self._begin([-1, 0, 0, 0])
            self._compared()  # the others learn of it
            raise
        digest = int.from_bytes(hashlib.blake2b(self._text.encode(), digest_size=7).digest(), "little")
        self._begin([self.call.tokens, self.call.differentiates, self.call.initial, digest])

    def _begin(self, numbers: list[int]) -> None:
        sent = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        self._gathering = Gathering(sent, self.ranks, f"what {self.operator} is called with")

    @property
    def place(self) -> Place:
        """This rank's. Nobody is waited for where nothing is packed."""
        if self.call.bounds is None:
            return self._whole_place(self.ranks.rank, self.call.tokens)
        return self.places[self.ranks.rank]

    @cached_property
    def places(self) -> list[Place]:
        if self.call.bounds is None:
            return [self._whole_place(rank, tokens) for rank, tokens in enumerate(self.lengths)]
        return packed_places(self.lengths, self.call.bounds)

    def _whole_place(self, rank: int, tokens: int) -> Place:
        return whole_place(rank, tokens, leaves=self.call.returns_state or rank < self.ranks.world - 1)

    @property
    def lengths(self) -> list[int]:
        return [row[0] for row in self._rows]

    @property
    def differentiates(self) -> bool:
        """Whether any rank may request a gradient: then every rank takes part in the backward's exchange."""
        return any(row[1] for row in self._rows)

    @property
    def initial(self) -> int:
        """What the first rank says of its initial state; 0 if there is none."""
        return self._rows[0][2]

    @cached_property
    def _rows(self) -> list[list[int]]:
        rows = self._compared()
        givers = [rank for rank, row in enumerate(rows) if row[2]]
        by, expected = "the first rank of the group alone", [0]
        if self.call.bounds is not None:
            by, expected = "every rank, with cu_seqlens", list(range(self.ranks.world))
        if givers not in ([], expected):
            raise ValueError(f"initial_state must be given by {by}, or by none; got it on {_listed(givers)}")
        if problem := _difference("the width of initial_state", [rows[rank][2] - 1 for rank in givers]):
            raise ValueError(f"fulmen.distributed.{self.operator}: {problem}")
        return rows

    def _compared(self) -> list[list[int]]:
        rows: list[list[int]] = self._gathering.wait().tolist()
        if any(row[0] < 0 or row[3] != rows[0][3] for row in rows):
            problem = self._problem()
            if rows[self.ranks.rank][0] >= 0:
                raise ValueError(f"fulmen.distributed.{self.operator}: {problem}")
        return rows

    def _problem(self) -> str:
        """In words: who refused its arguments, or what differs."""
        encoded = self._text.encode()[:_TEXT].ljust(_TEXT)
        sent = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(self._device)
        texts = Gathering(sent, self.ranks, f"what {self.operator} is called with").wait().cpu()
        facts = [_parsed(bytes(text.tolist())) for text in texts]
        if refused := {rank: x["refused"] for rank, x in enumerate(facts) if "refused" in x}:
            return "; ".join(f"rank {rank} refused its arguments: {why}" for rank, why in refused.items())
        names = dict.fromkeys(name for x in facts for name in x)
        return "; ".join(found for name in names if (found := _difference(name, [x.get(name) for x in facts])))


@contextmanager
def announcing(group: dist.ProcessGroup | DeviceMesh) -> Iterator[None]:
    """For what a rank checks before it calls an operator, as a layer does: where it raises, the others, who make the
    call, learn of it there instead of waiting."""
    try:
        yield
    except Exception as error:
        refused = error

        def described() -> Call:
            raise refused

        Agreement("a call", Ranks(group), torch.empty(0), described)


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except ValueError:  # a long one that was cut
        return {"refused": text.decode(errors="replace").strip()}


def _difference(name: str, values: list[Any]) -> str:
    """Which of the ranks' values differ, in words; empty if none do."""
    by_value: dict[Any, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        by_value[str(value)].append(rank)
    if len(by_value) <= 1:
        return ""
    found = ", ".join(f"{value} on {_listed(ranks)}" for value, ranks in by_value.items())
    return f"{name} must be the same on all ranks; got {found}"


def _listed(ranks: list[int]) -> str:
    shown = [*map(str, ranks[:8]), *(["..."] if len(ranks) > 8 else [])]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}"


# ---- facts of arguments ----------------------------------------------------------------------------------------------


def decay_facts(**log_decays: Tensor | None) -> dict[str, Any]:
    """The decay form of each, by the argument's name, and its dtype."""
    facts: dict[str, Any] = {}
    for name, x in log_decays.items():
        facts[f"the decay form of {name}"] = DecayForm.of(x).name.lower()
        facts[f"the dtype of {name}"] = None if x is None else str(x.dtype)
    return facts


def packed_facts(cu_seqlens: Tensor | None) -> tuple[dict[str, Any], list[int] | None]:
    """Of the global ``cu_seqlens``, and its values, which are read here: on an accelerator that waits for it."""
    if cu_seqlens is None:
        return {"cu_seqlens": None}, None
    bounds = packed_bounds(cu_seqlens, int(cu_seqlens[-1]))
    digest = hashlib.blake2b(json.dumps(bounds).encode(), digest_size=4).hexdigest()
    return {"cu_seqlens": f"{len(bounds)} entries up to {bounds[-1]} (digest {digest})"}, bounds


def may_differentiate(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
