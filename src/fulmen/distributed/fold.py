"""Summaries of shards, and their fold: from the left the state that enters a shard, from the right the gradient of the
state that leaves one.

What a run of tokens does to a state is linear: S_out = T S_in + S, with T a :class:`Transition` and S the state that it
leaves behind from nothing. The gradient goes back the same way: G_in = Tᵀ G_out + g, with g the gradient that the run's
own outputs send to the state that enters it. Both compose associatively, and every rank folds what all have sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fulmen.distributed.places import Place


class Transition(Protocol):
    """What a run of tokens makes of a state that enters it."""

    def __call__(self, state: Tensor) -> Tensor: ...

    def adjoint(self, grad_state: Tensor) -> Tensor: ...

    def tensors(self) -> tuple[Tensor, ...]:
        """What of it is sent to the other ranks."""

    def another(self, tensors: Sequence[Tensor], tokens: int) -> Transition:
        """That of another rank of the same call, from what it sent and the tokens it has."""


class Diagonal(NamedTuple):
    """The total decay of linear attention, as sums of logarithms: of the key axis ``[states, H, 1 or D]``, and of the
    value axis ``[states, H, E]``."""

    log_decay: Tensor | None
    log_decay_v: Tensor | None

    def __call__(self, state: Tensor) -> Tensor:
        if self.log_decay is not None:
            state = self.log_decay.exp()[..., :, None] * state
        return state if self.log_decay_v is None else state * self.log_decay_v.exp()[..., None, :]

    def adjoint(self, grad_state: Tensor) -> Tensor:
        return self(grad_state)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(x for x in self if x is not None)

    def another(self, tensors: Sequence[Tensor], tokens: int) -> Diagonal:
        sent = iter(tensors)
        return Diagonal(*[None if x is None else next(sent) for x in self])


class Matrix(NamedTuple):
    """The delta rule's, ``[states, H, D, D]``."""

    matrix: Tensor

    def __call__(self, state: Tensor) -> Tensor:
        return self.matrix @ state

    def adjoint(self, grad_state: Tensor) -> Tensor:
        return self.matrix.mT @ grad_state

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.matrix,)

    def another(self, tensors: Sequence[Tensor], tokens: int) -> Matrix:
        return Matrix(*tensors)


class Shift(NamedTuple):
    """The convolution's, whose state ``[states, C, W]`` is its last inputs: they move on by the run's tokens."""

    tokens: int

    def __call__(self, state: Tensor) -> Tensor:
        kept = torch.zeros_like(state)
        if self.tokens < state.shape[-1]:
            kept[..., : state.shape[-1] - self.tokens] = state[..., self.tokens :]
        return kept

    def adjoint(self, grad_state: Tensor) -> Tensor:
        kept = torch.zeros_like(grad_state)
        if self.tokens < grad_state.shape[-1]:
            kept[..., self.tokens :] = grad_state[..., : grad_state.shape[-1] - self.tokens]
        return kept

    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def another(self, tensors: Sequence[Tensor], tokens: int) -> Shift:
        return Shift(tokens)


class Summary(NamedTuple):
    """What a shard does to a state; the transition counts where a state enters and leaves it."""

    transition: Transition
    state: Tensor

    def sent(self) -> Tensor:
        """As one flat tensor, whose size does not depend on the length."""
        return torch.cat([x.flatten() for x in (*self.transition.tensors(), self.state)])

    def received(self, sent: Tensor, tokens: int) -> Summary:
        """That of another rank, which has as many ``tokens`` and the same sizes as this one."""
        own = (*self.transition.tensors(), self.state)
        *parts, state = (x.view(like.shape) for x, like in zip(sent.split([x.numel() for x in own]), own, strict=True))
        return Summary(self.transition.another(parts, tokens), state)


def entering_state(summaries: Sequence[Summary], places: Sequence[Place], rank: int) -> Tensor:
    """The state that enters the shard of ``rank`` from those before it; ``rank`` = world: the final one. What entered
    before a sequence began is never looked at. A copy: a view would keep all that was gathered."""
    first = max(i for i in range(rank) if i == 0 or not places[i].through)
    state = summaries[first].state.clone()
    for summary in summaries[first + 1 : rank]:
        state = summary.transition(state) + summary.state
    return state


def end_of_reach(places: Sequence[Place], rank: int) -> int:
    """The first rank after ``rank`` that no state passes through: what leaves ``rank`` gets no further. World if there
    is none."""
    return next((i for i in range(rank + 1, len(places)) if not places[i].through), len(places))


def leaving_gradient(
    transitions: Mapping[int, Transition],
    gradients: Tensor,
    places: Sequence[Place],
    rank: int,
    final: Tensor | None = None,
) -> Tensor:
    """The gradient of the state that leaves the shard of ``rank``. ``gradients`` are those of the states that enter the
    shards ``[world, ...]``, from their own outputs; ``final`` is that of the final state; transitions are those of the
    ranks up to :func:`end_of_reach`."""
    world, last = len(places), end_of_reach(places, rank)
    gradient = torch.zeros_like(gradients[rank]) if final is None or last < world else final
    if last < world and places[last].enters:
        gradient = gradients[last]
    for i in reversed(range(rank + 1, last)):
        gradient = transitions[i].adjoint(gradient) + gradients[i]
    return gradient
