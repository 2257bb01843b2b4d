"""Caches after packed sequences: they go on from the last sequence of each row."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from fulmen.integrations.transformers.packing import Packing
from fulmen.integrations.transformers.stepping_aside import say_once

CACHES = ("cache_params", "past_key_values")


def goes_on(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A mixer's forward, whose cache keeps no inputs of a convolution that are of earlier sequences than the last.

    What a recurrence keeps is of the last sequence as it is. Keys of softmax attention are transformers' business.
    """

    @functools.wraps(forward)
    def going_on(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        for name in CACHES:
            if kwargs.get(name) is not None and (packing := Packing.of(kwargs, *hidden_states.shape[:2])) is not None:
                kwargs[name] = _OfLastSequence(kwargs[name], packing)
        return forward(self, hidden_states, *args, **kwargs)

    return going_on


class _OfLastSequence:
    """A cache, for the time of a call with packed sequences."""

    def __init__(self, cache: Any, packing: Packing) -> None:
        self._cache, self._packing = cache, packing
        # A MiniMax's cache has no layers before they are filled.
        if not cache.layers or any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
            say_once(
                ("packed sequences", "cache"),
                "softmax attention of transformers lets packed sequences leak into each other where there is a cache: "
                "pass use_cache=False",
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        inputs = self._cache.update_conv_state(conv_states, layer_idx, state_idx=state_idx, **kwargs)
        states = self._cache.layers[layer_idx].conv_states
        width = states[state_idx].shape[-1]
        ago = torch.arange(width, 0, -1, device=conv_states.device)  # tokens
        forgotten = ago > self._packing.last_lengths()[:, None]
        # Not in place: a cache that records its past keeps the very tensor that the convolution is about to read.
        states[state_idx] = states[state_idx].masked_fill(forgotten[:, None], 0)
        return inputs
