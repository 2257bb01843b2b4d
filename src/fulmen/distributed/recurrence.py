"""A sequence that lies on several ranks, walked: summarise, exchange, fold, run from the state that enters.

Forward: each rank summarises its shard without its outputs, the summaries are gathered, each rank folds those before
it, and runs the local operator from there. A shard that nothing enters runs while the summaries are on their way.
Backward: each rank computes what its outputs send to the state that enters, these gradients are gathered, each rank
folds those after it, and the local operator's own backward goes on from the gradient of the state that leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from fulmen.distributed.agreement import Agreement
from fulmen.distributed.exchange import Gathering, Ranks, summed
from fulmen.distributed.fold import Summary, Transition, entering_state, leaving_gradient
from fulmen.distributed.places import Place

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

    def backward(self, entering: Tensor | None) -> tuple[EnteringGradient, tuple[Tensor | None, ...]]:
        """A function of the gradients of the outputs of the sequence that enters and of the state after them, either of
        which may be None, and the tensors that it takes as well. It gives the gradient of the state that enters,
        ``[states, ...]``."""


def walk(
    shard: Shard, agreement: Agreement, initial_state: Tensor | None, return_state: bool
) -> tuple[Tensor, Tensor | None]:
    """The shard's output, and on request the final state of the whole."""
    ranks, place = agreement.ranks, shard.place
    packed = agreement.call.bounds is not None
    starts = initial_state  # what the sequences that begin here begin from
    if packed and initial_state is not None:
        starts = initial_state[slice(*place.begun)]
    with torch.no_grad():
        begins_from = None if place.through or starts is None or not len(starts) else starts
        summary = shard.summarise(begins_from[-1:] if packed and begins_from is not None else begins_from)
        places = agreement.places
        gathering = Gathering(summary.sent(), ranks, f"the states of {agreement.operator}")
    differentiates = agreement.differentiates

    def run(entering: Tensor | None) -> tuple[Tensor, Tensor]:
        if not packed:
            return shard.run(entering if place.enters else starts)
        count = len(place.bounds or ()) - 1
        begun = shard.new_states(count - place.carried).zero_() if starts is None else starts
        carried = shard.new_states(place.carried).zero_() if entering is None else entering
        return shard.run(torch.cat([carried, begun]))

    at_once = None if place.enters else run(None)  # while the summaries are on their way
    with torch.no_grad():
        sent = gathering.wait()
        summaries = [summary.received(x, other.tokens) for x, other in zip(sent, places, strict=True)]
        entering = entering_state(summaries, places, ranks.rank) if place.enters else None
        final = entering_state(summaries, places, ranks.world) if return_state and not packed else None
    output, leaving = at_once or run(entering)
    if not differentiates and not (packed and return_state):
        return output, final
    entering_gradient, kept = shard.backward(entering)
    transitions = {i: summaries[i].transition for i in range(ranks.rank + 1, ranks.world)}
    onward = _Onward(entering_gradient, shard.new_states(shard.states), agreement, places, transitions, return_state)
    # Every rank takes part in the backward if one does, so the output requires grad on all of them.
    return _Leave.apply(_leaf(leaving, differentiates), output, leaving, final, onward, *kept)


def _leaf(like: Tensor, requires_grad: bool) -> Tensor:
    return torch.zeros((), device=like.device, requires_grad=requires_grad)


class _Onward:
    """The other ranks, as the backward of a shard meets them. It holds no tensor of the shard's size."""

    def __init__(
        self,
        entering_gradient: EnteringGradient,
        state: Tensor,
        agreement: Agreement,
        places: list[Place],
        transitions: dict[int, Transition],
        return_state: bool,
    ) -> None:
        self.entering_gradient, self.state = entering_gradient, state
        self.ranks, self.operator = agreement.ranks, agreement.operator
        self.place, self.places, self.return_state = places[agreement.ranks.rank], places, return_state
        self.sequences = 0 if agreement.call.bounds is None else len(agreement.call.bounds) - 1
        # Copies: views would keep all that was gathered.
        self.transitions = {
            i: x.another([part.clone() for part in x.tensors()], places[i].tokens) for i, x in transitions.items()
        }

    def final_states(self, leaving: Tensor) -> Tensor:
        """Of packed sequences: each rank has those that end on it."""
        rows = self._zeros(self.sequences)
        for everywhere, here in self.place.ended:
            rows[everywhere] = leaving[here]
        return summed(rows, self.ranks, f"the final states of {self.operator}")

    def gradient(
        self, grad_output: Tensor | None, grad_final: Tensor | None, kept: tuple[Tensor | None, ...]
    ) -> Tensor:
        """Of the states that leave the shard's sequences; ``grad_final`` is that of the final states on this rank."""
        if self.sequences:
            return self._of_packed(grad_output, grad_final, kept)
        entering, what = self._entering(grad_output, None, kept), f"the gradients of {self.operator}"
        if not self.return_state:
            return self._fold(Gathering(entering, self.ranks, what).wait())
        both = torch.stack([entering, torch.zeros_like(entering) if grad_final is None else grad_final])
        sent = Gathering(both, self.ranks, what).wait()
        return self._fold(sent[:, 0], sent[:, 1].sum(0))

    def _of_packed(
        self, grad_output: Tensor | None, grad_final: Tensor | None, kept: tuple[Tensor | None, ...]
    ) -> Tensor:
        gradient, what = self._zeros(len(self.place.bounds or ()) - 1), f"the gradients of {self.operator}"
        of_entered = None
        if self.return_state:
            of_all = summed(self._zeros(self.sequences) if grad_final is None else grad_final.clone(), self.ranks, what)
            for everywhere, here in self.place.ended:
                gradient[here] = of_all[everywhere]
                if here == 0 and self.place.enters:
                    of_entered = of_all[everywhere, None]
        entering = self._entering(grad_output, of_entered, kept)
        gradient[-1:] += self._fold(Gathering(entering, self.ranks, what).wait())
        return gradient

    def _entering(
        self, grad_output: Tensor | None, grad_state: Tensor | None, kept: tuple[Tensor | None, ...]
    ) -> Tensor:
        """Of the state that enters, from what its sequence gives here: outputs, and the final state if it ends."""
        head = self.place.head
        if not head or (grad_output is None and grad_state is None):
            return torch.zeros_like(self.state)
        return self.entering_gradient(None if grad_output is None else grad_output[:, :head], grad_state, *kept)

    def _fold(self, gradients: Tensor, final: Tensor | None = None) -> Tensor:
        return leaving_gradient(self.transitions, gradients, self.places, self.ranks.rank, final)

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
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(output)  # else it were a view, which may not be modified in place
        if onward.return_state and onward.sequences:
            final = onward.final_states(leaving)
        return output, final

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        grad_leaving = ctx.onward.gradient(grad_output, grad_final, kept)
        return None, grad_output, grad_leaving, None, None, *[None] * len(kept)


class _SummedGradient(torch.autograd.Function):
    """A parameter that every rank has; its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, ranks: Ranks, name: str) -> Tensor:
        ctx.ranks, ctx.name = ranks, name
        return parameter

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return summed(gradient.clone(), ctx.ranks, f"the gradient of {ctx.name}"), None, None


def with_summed_gradient(parameter: Tensor, ranks: Ranks, name: str) -> Tensor:
    """``parameter``, whose gradient will be the sum over the ranks on each of them."""
    return _SummedGradient.apply(parameter, ranks, name) if parameter.requires_grad else parameter
