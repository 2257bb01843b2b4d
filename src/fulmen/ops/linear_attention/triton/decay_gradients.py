"""The gradients of decays, from what the walks of a backward leave behind."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fulmen.ops.chunks.decay_form import DecayForm
from fulmen.ops.linear_attention.triton.launch import Gradient, Launcher, RowSums


class KeyDecayGradient:
    """The gradient of a decay per channel of the keys, which the walks for dq and dk write where it goes.

    Args:
        into: None if nobody requests it.
    """

    def __init__(self, into: Tensor | None) -> None:
        self.into = into

    @property
    def requested(self) -> bool:
        return self.into is not None

    def of_walk(self, walk: str, factor: Tensor, boundaries: Tensor | None = None) -> RowSums | None:
        """What the walk for dq or dk leaves; ``boundaries`` are the states there, for dk."""
        return None if self.into is None else RowSums(factor, self.into, None, boundaries)

    def finish(self) -> None: ...


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


class DecayGradient:
    """The gradient of the decay of one axis, as the scans that write this axis collect it.

    A decay per channel is written as it is, ``[B, N, H, K]``. A scalar one has parts, one for each tile of the axis:
    ``[B, N, H, tiles]``, or ``[sequences, segments, H, tiles]`` for one number per head.

    Args:
        into: where it goes in the end; None if nobody requests it.
        walks: 2, or 1 where there is only the walk backward in time.
    """

    def __init__(self, run: Launcher, like: Tensor, into: Tensor | None, axis: str, walks: int) -> None:
        self.into, self.form = into, DecayForm.of(into)
        if into is None:
            return
        tile = run.scan_tile(axis, gradient=True)
        batch, length, _, size = like.shape
        of_channels, of_heads = self.form.by_channel, not self.form.has_tokens
        columns = size if of_channels else triton.cdiv(size, tile.width)
        outer = (run.sequences, run.partition.segments) if of_heads else (batch, length)
        self.parts = into if of_channels else into.new_empty(*outer, run.heads, columns)
        self.given = None
        if walks == 2 and of_heads:  # other forms hold it in the gradient itself
            packed = run.partition.cu_seqlens is not None
            chunks = length // tile.chunk + run.sequences if packed else triton.cdiv(length, tile.chunk)
            self.given = into.new_empty(batch, chunks, run.heads, columns)

    @property
    def requested(self) -> bool:
        return self.into is not None

    def walk(self, factor: Tensor, boundaries: Tensor | None = None) -> Gradient | None:
        return None if self.into is None else Gradient(factor, self.parts, self.given, boundaries)

    def finish(self) -> None:
        if self.into is not None and not self.form.by_channel:
            torch.sum(self.parts, 3 if self.form.has_tokens else (0, 1, 3), out=self.into)
