"""The gradients of decays, from what the walks of a backward leave behind."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fulmen.ops.chunks.decay_form import DecayForm
from fulmen.ops.linear_attention.problem import Attention, Gradients, States
from fulmen.ops.linear_attention.triton.launch import Launcher, RowSums


class ChannelDecayGradient:
    """The gradient of a decay per channel, which the walks that write its axis put where it goes.

    Args:
        into: None if nobody requests it.
        of_scalar: where the gradient of a scalar decay goes that stands beside it, the sum over the channels; None if
            nobody requests it or there is none.
    """

    def __init__(self, run: Launcher, into: Tensor | None, of_scalar: Tensor | None = None) -> None:
        self.run, self.into, self.of_scalar = run, into, of_scalar

    @property
    def requested(self) -> bool:
        return self.into is not None

    def of_walk(self, walk: str, factor: Tensor, boundaries: Tensor | None = None) -> RowSums | None:
        """What a walk leaves; ``boundaries`` are the states there, for one backward in time."""
        return None if self.into is None else RowSums(factor, self.into, None, boundaries)

    def finish(self) -> None:
        if self.into is not None and self.of_scalar is not None:
            self.run.clear_rest(self.into)
            torch.sum(self.into, 3 if DecayForm.of(self.of_scalar).has_tokens else (0, 1, 3), out=self.of_scalar)


class ScalarDecayGradient:
    """The gradient of a decay that all channels share, from sums over the rows of dq and dk.

    Args:
        like: k.
        into: where it goes in the end; None if nobody requests it.
        walks: 2, or 1 where there is only the walk backward in time.
    """

    def __init__(self, run: Launcher, like: Tensor, into: Tensor | None, walks: int) -> None:
        self.run, self.into = run, into
        if into is None:
            return
        batch, length = like.shape[:2]
        tiles = triton.cdiv(run.key_size, run.walk_tile("key", precise=True).width)

        def new(outer: int, inner: int) -> Tensor:
            """``[outer, inner, H * tiles]``, with the inner ones side by side."""
            return into.new_empty(outer, run.heads * tiles, inner).transpose(1, 2)

        self.forward = new(batch, length) if walks == 2 else None
        self.backward = new(batch, length)
        self.crossing = new(run.sequences, run.partition.segments)

    @property
    def requested(self) -> bool:
        return self.into is not None

    def of_walk(self, walk: str, factor: Tensor, boundaries: Tensor | None = None) -> RowSums | None:
        """What the walk for dq or dk leaves; ``boundaries`` are the states there, for dk."""
        if self.into is None:
            return None
        if walk == "dk":
            return RowSums(factor, self.backward, self.crossing, boundaries)
        return None if self.forward is None else RowSums(factor, self.forward, None, None)

    def finish(self) -> None:
        if self.into is None:
            return
        of_tokens = DecayForm.of(self.into).has_tokens
        batch, length, _ = self.backward.shape
        gradient = self.into if of_tokens else self.into.new_empty(batch, length, self.run.heads)
        self.run.sum_decay_gradient(self.forward, self.backward, self.crossing, gradient)
        if not of_tokens:
            self.run.clear_rest(gradient)
            torch.sum(gradient, (0, 1), out=self.into)


DecayGradient = ChannelDecayGradient | ScalarDecayGradient


def decay_gradients(run: Launcher, p: Attention | States, grads: Gradients, walks: int) -> dict[str, DecayGradient]:
    """By the axis of the walks that collect it. ``walks``: 2, or 1 where there are only those backward in time."""
    key, value = grads.log_decay, grads.log_decay_v
    if run.logs.key is not None:
        return {"key": ChannelDecayGradient(run, key), "value": ChannelDecayGradient(run, value)}
    if run.logs.value is None:
        return {"key": ScalarDecayGradient(run, p.k, key, walks), "value": ChannelDecayGradient(run, None)}
    if value is None and key is not None:
        batch, length, _, size = p.v.shape
        value = key.new_empty(batch, length, run.heads, size)
    return {"key": ChannelDecayGradient(run, None), "value": ChannelDecayGradient(run, value, key)}
