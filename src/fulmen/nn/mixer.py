"""What the layers that go from token to token have in common."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fulmen.nn.cache import LayerCache
from fulmen.nn.call import Call
from fulmen.nn.step import step

if TYPE_CHECKING:
    from fulmen.distributed.api import Group


class Mixer(nn.Module):
    """A causal layer: ``[B, N, hidden_size]`` to the same. Subclasses say in :meth:`mix` what they compute."""

    hidden_size: int

    def forward(
        self,
        x: Tensor,
        *,
        cache: LayerCache | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        group: Group | None = None,
    ) -> Tensor:
        """
        Args:
            x: ``[B, N, hidden_size]``.
            cache: this layer's entry of a :class:`fulmen.nn.StateCache`: the tokens go on from it, and it is brought up
                to date. A row of it is a sample, or with cu_seqlens a sequence. One token under ``torch.no_grad()``
                updates the states where they are; else gradients flow through them.
            cu_seqlens: ``[sequences + 1]``, int32 or int64: where each of several sequences packed along N starts, and
                N. B must be 1. Nothing passes from one to the other.
            attention_mask: ``[B, N]``, bool or numbers: 0 where x is padding, before, after or between the tokens. That
                is not computed, no state sees it, and the output is 0 there.
            group: the ranks that hold the sequence, a torch.distributed ProcessGroup or a one-dimensional DeviceMesh: x
                is this rank's shard of it, and cu_seqlens are those of the whole (:mod:`fulmen.distributed`). Gradients
                of weights are this rank's part, for DDP or FSDP to reduce. Not with a cache or padding.

        Returns:
            ``[B, N, hidden_size]``.

        Raises:
            TypeError, ValueError: before any work, naming the argument, what it was and what it must be.
        """
        if cache is None or torch.compiler.is_compiling():
            return self._computed(x, cache, cu_seqlens, attention_mask, group)
        compute = partial(self._computed, x, cache, cu_seqlens, attention_mask, group)
        if cu_seqlens is not None or attention_mask is not None or group is not None:
            return compute()
        return step(self, x, cache, compute)

    def _computed(
        self,
        x: Tensor,
        cache: LayerCache | None,
        cu_seqlens: Tensor | None,
        attention_mask: Tensor | None,
        group: Group | None,
    ) -> Tensor:
        arguments = x, self.hidden_size, cache, cu_seqlens, attention_mask, group
        if group is None:
            call = Call(*arguments)
        else:
            with _announcing(group):
                call = Call(*arguments)
        return call.rows(self.mix(call.tokens(x), call))

    def mix(self, x: Tensor, call: Call) -> Tensor:
        """``[..., hidden_size]`` to the same, with the operators of the call, which knows what ``...`` is."""
        raise NotImplementedError


def _announcing(group: Group) -> AbstractContextManager[None]:
    from fulmen import distributed  # which takes its time

    return distributed.announcing(group)


def check_heads(**sizes: int) -> None:
    """``check_heads(hidden_size=512, num_heads=3)``: the second must divide the first."""
    (whole, size), (part, count) = sizes.items()
    if size % count:
        raise ValueError(f"{part} must divide {whole}, {size}; got {count}")
