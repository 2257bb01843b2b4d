"""One call of a layer: where its sequences are, and the operators on them, which take states from a cache and leave
them there. All that layers compute over tokens goes through here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import fulmen
from fulmen.nn.cache import LayerCache, StateCache
from fulmen.nn.padding import Padding
from fulmen.ops.chunks.sequences import check_cu_seqlens

if TYPE_CHECKING:
    from fulmen.distributed.api import Group  # which takes its time to import


class Call:
    """Args: as of a layer's forward; ``hidden_size`` is what x must have."""

    def __init__(
        self,
        x: Tensor,
        hidden_size: int,
        cache: LayerCache | None,
        cu_seqlens: Tensor | None,
        attention_mask: Tensor | None,
        group: Group | None,
    ) -> None:
        check_tokens(x, hidden_size, cu_seqlens, attention_mask)
        if group is not None and (cache is not None or attention_mask is not None):
            raise ValueError("group must be None with a cache or an attention_mask: a shard has neither")
        self._group = group
        if cache is not None and not isinstance(cache, LayerCache):
            found = "the whole StateCache" if isinstance(cache, StateCache) else type(cache).__name__
            raise TypeError(f"cache must be the entry of one layer, cache[i] of a fulmen.nn.StateCache; got {found}")
        self.cache = cache
        self._padding = None if attention_mask is None else Padding.of(attention_mask)
        self.cu_seqlens = cu_seqlens if self._padding is None else self._padding.cu_seqlens
        before = None if cache is None else cache.rows
        rows = x.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        if before not in (None, rows):
            raise ValueError(f"cache must have a row for each of {rows} sequences; got {before} rows")
        self.goes_on = before is not None
        # A step updates states in place, which has no gradient; until there are states it is a walk.
        self.steps = self.goes_on and x.shape[1] == 1 and self.cu_seqlens is None and not torch.is_grad_enabled()

    def tokens(self, x: Tensor) -> Tensor:
        """What is computed of ``[B, N, C]``: all of it; of padded rows the tokens, ``[1, tokens, C]``; of a step ``[B,
        C]``. Below, ``...`` stands for what is before C."""
        if self.steps:
            return x.squeeze(1)
        return x if self._padding is None else self._padding.remove(x)

    def rows(self, x: Tensor) -> Tensor:
        """The same, back in ``[B, N, C]``; zeros at padding."""
        if self.steps:
            return x.unsqueeze(1)
        return x if self._padding is None else self._padding.restore(x)

    def causal_conv1d(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        """``[..., C]``; ``name`` is that of the state in the cache."""
        if self.steps:
            return fulmen.causal_conv1d_step(x, self._state(name), weight, bias, activation=activation)
        return self._walk(self._operator("causal_conv1d"), name, x, weight, bias, activation=activation)

    def linear_attention(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, scale: float | None = None
    ) -> Tensor:
        """``[..., H, E]``."""
        if self.steps:
            return fulmen.linear_attention_step(q, k, v, self._state("recurrent"), log_decay=log_decay, scale=scale)
        run = self._operator("linear_attention")
        return self._walk(run, "recurrent", q, k, v, log_decay=log_decay, scale=scale)

    @property
    def walks_here(self) -> bool:
        """All tokens in this process: neither a step, nor on the ranks of a group."""
        return not self.steps and self._group is None

    def walk(self, operator: Callable[..., Any], *inputs: Tensor, **options: Any) -> Tensor:
        """``[..., H, E]`` of an operator with the states of linear attention, where all tokens are here."""
        return self._walk(operator, "recurrent", *inputs, **options)

    def delta_rule(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
        """``[..., H, E]``, with normalised q and k."""
        if self.steps:
            state = self._state("recurrent")
            return fulmen.delta_rule_step(q, k, v, beta, state, log_decay=log_decay, normalize_qk=True)
        run = self._operator("delta_rule")
        return self._walk(run, "recurrent", q, k, v, beta, log_decay=log_decay, normalize_qk=True)

    def _state(self, name: str) -> Tensor:
        if self.cache is None or name not in self.cache.states:
            raise self.foreign_cache(f"a state {name!r}")
        return self.cache.states[name]

    def foreign_cache(self, missing: str) -> ValueError:
        return ValueError(f"cache must be this layer's own entry, with {missing}; got {self.cache}")

    def _walk(self, run: Callable[..., Any], name: str, *inputs: Tensor | None, **options: Any) -> Tensor:
        """All tokens of the call, from the state in the cache to the one that is left there."""
        if self.cache is None:
            return run(*inputs, cu_seqlens=self.cu_seqlens, **options)
        state = self._state(name) if self.goes_on else None
        output, self.cache.states[name] = run(
            *inputs, initial_state=state, return_state=True, cu_seqlens=self.cu_seqlens, **options
        )
        return output

    def _operator(self, name: str) -> Callable[..., Any]:
        """On the tokens that are here, or on those of all ranks."""
        if self._group is None:
            return getattr(fulmen, name)
        from fulmen import distributed

        return partial(getattr(distributed, name), group=self._group)

    def refuse_group(self, layer: str) -> None:
        """For a layer in which tokens meet otherwise than in these operators."""
        if self._group is not None:
            raise ValueError(f"group must be None: {layer} needs all tokens of a sequence in one process")


def check_tokens(x: Tensor, hidden_size: int, cu_seqlens: Tensor | None, attention_mask: Tensor | None) -> None:
    """What every layer's forward takes."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor [B, N, hidden_size]; got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"x must be float32, bfloat16, float16 or float64; got {x.dtype}")
    if x.ndim != 3 or x.shape[2] != hidden_size:
        raise ValueError(f"x must have shape [B, N, {hidden_size}]; got {list(x.shape)}")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, x, "x")
        if attention_mask is not None:
            raise ValueError("attention_mask must be None with cu_seqlens: packed sequences have no padding")
    if attention_mask is not None:
        if not isinstance(attention_mask, Tensor):
            raise TypeError(f"attention_mask must be a torch.Tensor or None; got {type(attention_mask).__name__}")
        if attention_mask.shape != x.shape[:2]:
            raise ValueError(
                f"attention_mask must have shape [B, N] = {list(x.shape[:2])}, one entry for each token of the call; "
                f"got {list(attention_mask.shape)}"
            )
        if attention_mask.device != x.device:
            raise ValueError(f"attention_mask must be on the device of x, {x.device}; got {attention_mask.device}")
