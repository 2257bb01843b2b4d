"""The gradients of decays, from what the walks of a backward leave behind (:mod:`.walk`)."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fulmen.ops.chunks.decay_form import DecayForm
from fulmen.ops.linear_attention.problem import Attention, Gradients, States
from fulmen.ops.linear_attention.triton.launch import BACKWARD, Launcher, RowSums


class DecayGradient:
    """One that nobody requests."""

    requested = False
    subtracts = False  # whether it takes away what it added, so that rounding adds up along a segment

    def of_walk(self, walk: str, factor: Tensor, boundaries: Tensor | None) -> RowSums | None:
        """What a walk leaves for it.

        Args:
            factor: of the walk's results in the loss.
            boundaries: of a walk backward in time the states at the boundaries, else their gradients.
        """
        return None

    def finish(self) -> None:
        """Put it where it goes."""


class HeadDecayGradient(DecayGradient):
    """Of a decay per head: the walk for dq counts the decays between two tokens."""

    requested = True

    def __init__(self, run: Launcher, into: Tensor) -> None:
        self.into, self.heads = into, run.heads
        self.found = into.new_empty(
            run.sequences, run.partition.segments, run.heads * tiles_of_keys(run, counts_decays=True)
        )

    def of_walk(self, walk: str, factor: Tensor, boundaries: Tensor | None) -> RowSums | None:
        return RowSums(factor, None, self.found, boundaries) if walk == "dq" else None

    def finish(self) -> None:
        torch.sum(self.found.unflatten(2, (self.heads, -1)), (0, 1, 3), out=self.into)


class TokenDecayGradient(DecayGradient):
    """Of a decay per token, from sums over the rows of dq and dk."""

    requested = subtracts = True

    def __init__(self, run: Launcher, like: Tensor, into: Tensor) -> None:
        self.run, self.into = run, into
        self.forward, self.backward = (of_rows(run, like, into) for _ in range(2))
        self.crossing = of_segments(run, self.backward)

    def of_walk(self, walk: str, factor: Tensor, boundaries: Tensor | None) -> RowSums | None:
        if walk == "dk":
            return RowSums(factor, self.backward, self.crossing, boundaries)
        return RowSums(factor, self.forward, None, None)

    def finish(self) -> None:
        self.run.sum_decay_gradient(self.forward, self.backward, self.crossing, self.into)


class ChannelDecayGradient(DecayGradient):
    """Of a decay per channel, which the walks that write its axis put where it goes.

    Args:
        of_scalar: where the gradient of a scalar decay goes that stands beside it; None if nobody requests it or there
            is none.
    """

    requested = subtracts = True

    def __init__(self, run: Launcher, into: Tensor, of_scalar: Tensor | None) -> None:
        self.run, self.into, self.of_scalar = run, into, of_scalar

    def of_walk(self, walk: str, factor: Tensor, boundaries: Tensor | None) -> RowSums | None:
        return RowSums(factor, self.into, None, boundaries if walk in BACKWARD else None)

    def finish(self) -> None:
        sum_channels(self.run, self.into, self.of_scalar)


class StatesDecayGradient(DecayGradient):
    """Of any decay, where tokens have an effect through the states at boundaries alone.

    Args:
        sums: of rows, ``[B, N, H * tiles]``; or ``[B, N, H, D or E]``, where the gradient of a decay per channel goes.
        of_scalar: where the gradient of a scalar decay goes.
    """

    requested = True

    def __init__(self, run: Launcher, sums: Tensor, of_scalar: Tensor | None) -> None:
        self.run, self.sums, self.of_scalar = run, sums, of_scalar
        self.crossing = of_segments(run, sums)

    def of_walk(self, walk: str, factor: Tensor, boundaries: Tensor | None) -> RowSums | None:
        return RowSums(factor, self.sums, self.crossing, boundaries)

    def finish(self) -> None:
        self.run.sum_before(self.sums, self.crossing)
        sum_channels(self.run, self.sums, self.of_scalar)


def of_rows(run: Launcher, like: Tensor, into: Tensor) -> Tensor:
    """``[B, N, H * tiles]``, with the tokens side by side."""
    batch, length = like.shape[:2]
    return into.new_empty(batch, run.heads * tiles_of_keys(run), length).transpose(1, 2)


def tiles_of_keys(run: Launcher, counts_decays: bool = False) -> int:
    return triton.cdiv(run.key_size, run.walk_tile("key", precise=True, counts_decays=counts_decays).width)


def of_segments(run: Launcher, sums: Tensor) -> Tensor:
    return sums.new_empty(run.sequences, run.partition.segments, *sums.shape[2:])


def sum_channels(run: Launcher, of_channels: Tensor, into: Tensor | None) -> None:
    """The gradient of a scalar decay from those of the channels of each head, or of its tiles."""
    if into is not None:
        run.clear_rest(of_channels)
        of_heads = of_channels.flatten(2).unflatten(2, (run.heads, -1))
        torch.sum(of_heads, 3 if DecayForm.of(into).has_tokens else (0, 1, 3), out=into)


def decay_gradients(
    run: Launcher, p: Attention | States, grads: Gradients, through_states: bool
) -> dict[str, DecayGradient]:
    """By the axis of the walks that collect it. ``through_states``: tokens have an effect through these alone."""
    key, value = grads.log_decay, grads.log_decay_v

    def of_channels(into: Tensor | None, of_scalar: Tensor | None = None) -> DecayGradient:
        if into is None:
            return DecayGradient()
        return (StatesDecayGradient if through_states else ChannelDecayGradient)(run, into, of_scalar)

    if run.logs.key is not None:
        return {"key": of_channels(key), "value": of_channels(value)}
    if run.logs.value is not None:
        if value is None and key is not None:
            batch, length, _, size = p.v.shape
            value = key.new_empty(batch, length, run.heads, size)
        return {"key": DecayGradient(), "value": of_channels(value, key)}
    return {"key": of_scalar_decay(run, p.k, key, through_states), "value": DecayGradient()}


def of_scalar_decay(run: Launcher, like: Tensor, into: Tensor | None, through_states: bool) -> DecayGradient:
    if into is None:
        return DecayGradient()
    if through_states:
        return StatesDecayGradient(run, of_rows(run, like, into), into)
    return TokenDecayGradient(run, like, into) if run.per_token else HeadDecayGradient(run, into)
