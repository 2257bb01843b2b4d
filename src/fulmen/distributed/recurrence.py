"""A sequence that lies on several ranks, walked: summarise, exchange, fold, run from the state that enters.

Forward: each rank summarises its shard without its outputs, the summaries are gathered, each rank folds those before
it, and runs the local operator from there. A shard that nothing enters runs while the summaries are on their way.
Backward: each rank computes what its outputs send to the state that enters, these gradients are gathered, each rank
folds those after it, and the local operator's own backward goes on from the gradient of the state that leaves. A shard
that nothing leaves goes on at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fulmen.distributed.agreement import Agreement
from fulmen.distributed.exchange import Gathering, Ranks, summed
from fulmen.distributed.fold import Summary, Transition, end_of_reach, entering_state, leaving_gradient
from fulmen.distributed.places import Place
from fulmen.runtime.tensors import state_dtype
from fulmen.runtime.torch_private import at_the_end_of_backward

EnteringGradient = Callable[..., Tensor]


class Shard(Protocol):
    """One rank's part of a call, at its place in the whole."""

    @property
    def place(self) -> Place: ...

    @property
    def states(self) -> int:
        """How many states enter at once: B, or 1 of packed sequences."""

    def new_states(self, count: int) -> Tensor:
        """Uninitialised states, ``[count, ...]``."""

    def summarise(self, initial: Tensor | None) -> Summary:
        """What the shard does to a state. ``initial`` is what its last sequence begins from, if it begins here."""

    def run(self, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        """The local operator, differentiable: the output, and the state that leaves each sequence."""

    def backward(self) -> tuple[EnteringGradient, tuple[Tensor | None, ...]]:
        """A function that gives the gradient of the state that enters, ``[states, ...]``, and the last of the tensors
        that it takes: the gradients of the outputs of the sequence that enters and of the state after them, either of
        which may be None, the state that enters, and these."""


def is_learned(*log_decays: Tensor | None) -> bool:
    return any(x is not None and x.requires_grad for x in log_decays)


def precise(learned: bool, *inputs: Tensor) -> tuple[Tensor, ...]:
    """What goes into a state that another rank differentiates its decays with, or into the gradient of such a state.
    Where a decay is learned, in the dtype of states: from factors of 16 bits its gradient would drift."""
    return tuple(x.to(state_dtype(x.dtype)) for x in inputs) if learned else inputs


def walk(shard: Shard, agreement: Agreement, initial_state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The shard's output, and on request the final state of the whole."""
    with _full_precision(agreement.device):
        return _walk(shard, agreement, initial_state)


def _full_precision(device: torch.device) -> torch.autocast:
    """Inputs have been cast already, and states keep their precision."""
    return torch.autocast(device.type, enabled=False)


def _walk(shard: Shard, agreement: Agreement, initial_state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    ranks, place = agreement.ranks, shard.place
    packed, return_state = agreement.call.bounds is not None, agreement.call.returns_state
    starts = initial_state  # what the sequences that begin here begin from
    if packed and initial_state is not None:
        starts = initial_state[slice(*place.begun)]

    def run(entering: Tensor | None) -> tuple[Tensor, Tensor]:
        if not packed:
            return shard.run(entering if place.enters else starts)
        count = len(place.bounds or ()) - 1
        begun = shard.new_states(count - place.carried).zero_() if starts is None else starts
        carried = shard.new_states(place.carried).zero_() if entering is None else entering
        return shard.run(torch.cat([carried, begun]))

    with torch.no_grad():
        begins_from = None if place.through or starts is None or not len(starts) else starts
        summary = shard.summarise(begins_from[-1:] if packed and begins_from is not None else begins_from)
        places = agreement.places
        gathering = Gathering(summary.sent(), ranks, f"the states of {agreement.operator}")
    # While the summaries are on their way:
    backward = shard.backward() if agreement.differentiates else None
    at_once = None if place.enters else run(None)
    with torch.no_grad():
        sent = gathering.wait()
        summaries = [summary.received(x, other.tokens) for x, other in zip(sent, places, strict=True)]
        entering = entering_state(summaries, places, ranks.rank) if place.enters else None
        final = entering_state(summaries, places, ranks.world) if return_state and not packed else None
    output, leaving = at_once or run(entering)
    if packed and return_state:
        final = _final_states(leaving.detach(), agreement)
    if backward is None:
        return output, final
    onward = _Onward(backward[0], shard.new_states(shard.states), agreement, _needed_transitions(summaries, agreement))
    # Every rank takes part in the backward if one does, so the output requires grad on all of them.
    leaf = torch.zeros((), device=output.device, requires_grad=True)
    return _Leave.apply(leaf, output, leaving, final, onward, entering, *backward[1])


def _final_states(leaving: Tensor, agreement: Agreement) -> Tensor:
    """Of packed sequences: each rank has those that end on it."""
    rows = leaving.new_zeros(len(agreement.call.bounds or ()) - 1, *leaving.shape[1:])
    for everywhere, here in agreement.place.ended:
        rows[everywhere] = leaving[here]
    return summed(rows, agreement.ranks, f"the final states of {agreement.operator}")


def _needed_transitions(summaries: Sequence[Summary], agreement: Agreement) -> dict[int, Transition]:
    """Of the ranks that the state which leaves this one passes through. Copies: views would keep all that was
    gathered."""
    rank, places = agreement.ranks.rank, agreement.places
    through = {i: summaries[i].transition for i in range(rank + 1, end_of_reach(places, rank))}
    return {i: x.another([part.clone() for part in x.tensors()], places[i].tokens) for i, x in through.items()}


@dataclass(frozen=True)
class _Onward:
    """The other ranks, as the backward of a shard meets them. It holds no tensor of the shard's size; ``state`` has the
    shape of what enters."""

    entering_gradient: EnteringGradient
    state: Tensor
    agreement: Agreement
    transitions: dict[int, Transition]

    @property
    def place(self) -> Place:
        return self.agreement.place

    def gradient(
        self, grad_output: Tensor | None, grad_final: Tensor | None, kept: tuple[Tensor | None, ...]
    ) -> Tensor:
        """Of the states that leave the shard's sequences; ``grad_final`` is that of the final states on this rank."""
        if self.agreement.call.bounds is not None:
            return self._of_packed(self.agreement.call.bounds, grad_output, grad_final, kept)
        entering = self._entering(grad_output, None, kept)
        if not self.agreement.call.returns_state:
            return self._fold(self._gathering(entering))
        both = torch.stack([entering, torch.zeros_like(entering) if grad_final is None else grad_final])
        sent = self._gathering(both).wait()
        return leaving_gradient(
            self.transitions, sent[:, 0], self.agreement.places, self.agreement.ranks.rank, sent[:, 1].sum(0)
        )

    def _of_packed(
        self, bounds: list[int], grad_output: Tensor | None, grad_final: Tensor | None, kept: tuple[Tensor | None, ...]
    ) -> Tensor:
        gradient = self._zeros(len(self.place.bounds or ()) - 1)
        of_entered = None
        if self.agreement.call.returns_state:
            own = self._zeros(len(bounds) - 1) if grad_final is None else grad_final.clone()
            of_all = summed(own, self.agreement.ranks, self._what)
            for everywhere, here in self.place.ended:
                gradient[here] = of_all[everywhere]
                if here == 0 and self.place.enters:
                    of_entered = of_all[everywhere, None]
        entering = self._entering(grad_output, of_entered, kept)
        gradient[-1:] += self._fold(self._gathering(entering))
        return gradient

    def _entering(
        self, grad_output: Tensor | None, grad_state: Tensor | None, kept: tuple[Tensor | None, ...]
    ) -> Tensor:
        """Of the state that enters, from what its sequence gives here: outputs, and the final state if it ends."""
        head = self.place.head
        if not head or (grad_output is None and grad_state is None):
            return torch.zeros_like(self.state)
        return self.entering_gradient(None if grad_output is None else grad_output[:, :head], grad_state, *kept)

    @property
    def _what(self) -> str:
        return f"the gradients of {self.agreement.operator}"

    def _gathering(self, x: Tensor) -> Gathering:
        return Gathering(x, self.agreement.ranks, self._what)

    def _fold(self, gathering: Gathering) -> Tensor:
        if not self.place.leaves:  # the others' gradients are not for this rank
            at_the_end_of_backward(gathering.wait)
            return torch.zeros_like(self.state)
        return leaving_gradient(self.transitions, gathering.wait(), self.agreement.places, self.agreement.ranks.rank)

    def _zeros(self, count: int) -> Tensor:
        return self.state.new_zeros(count, *self.state.shape[1:])


class _Leave(torch.autograd.Function):
    """Hands on what the local operator gave. Its gradient is where the ranks meet again: from the gradient of the
    output it makes that of the states that leave, before the local operator's own backward runs."""

    @staticmethod
    def forward(
        ctx: Any,
        leaf: Tensor,
        output: Tensor,
        leaving: Tensor,
        final: Tensor | None,
        onward: _Onward,
        *kept: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.onward = onward
        # The leaf as well: whatever a shard keeps, every rank keeps something, so that under activation checkpointing
        # all begin to recompute, and to exchange, when they ask for it.
        ctx.save_for_backward(leaf, *kept)
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(output)  # else it were a view, which may not be modified in place
        return output, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        _, *kept = ctx.saved_tensors
        with _full_precision(ctx.onward.state.device):
            grad_leaving = ctx.onward.gradient(grad_output, grad_final, tuple(kept))
        return None, grad_output, grad_leaving, None, None, *[None] * len(kept)


class _SummedGradient(torch.autograd.Function):
    """A parameter that every rank has; its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, ranks: Ranks, name: str) -> Tensor:
        ctx.ranks, ctx.name = ranks, name
        return parameter

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return summed(gradient.clone(), ctx.ranks, f"the gradient of {ctx.name}"), None, None


def with_summed_gradient(parameter: Tensor, ranks: Ranks, name: str) -> Tensor:
    """``parameter``, whose gradient will be the sum over the ranks on each of them."""
    return _SummedGradient.apply(parameter, ranks, name) if parameter.requires_grad else parameter
