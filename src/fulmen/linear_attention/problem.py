"""What an operator call asks for, as the backends see it: validated tensors, and where results go.

The operators (:mod:`fulmen.linear_attention.ops`) allocate every result; a backend only fills what it is handed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from fulmen.linear_attention.validation import packed_bounds
from fulmen.tensors import state_dtype


class Attention(NamedTuple):
    """One call of ``linear_attention``."""

    q: Tensor  # [B, N, Hq, D]
    k: Tensor  # [B, N, Hk, D]
    v: Tensor  # [B, N, Hv, E]
    decay: Tensor | None  # [H], [B, N, H] or [B, N, H, D]
    decay_v: Tensor | None  # [B, N, H, E]
    scale: float
    initial_state: Tensor | None  # [B or sequences, H, D, E]
    cu_seqlens: Tensor | None
    schedule: str

    @property
    def heads(self) -> int:
        return max(self.q.shape[2], self.k.shape[2], self.v.shape[2])

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        return self.q.shape[0], self.q.shape[1], self.heads, self.v.shape[3]

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        states = self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        return states, self.heads, self.q.shape[3], self.v.shape[3]

    def sequences(self) -> Iterator[tuple[Attention, slice, slice]]:
        """Each packed sequence as a call of its own, with its slice of the tokens and of the states."""
        if self.cu_seqlens is None:
            yield self, slice(None), slice(None)
            return
        bounds = packed_bounds(self.cu_seqlens, self.q.shape[1])
        for i in range(len(bounds) - 1):
            tokens, row = slice(bounds[i], bounds[i + 1]), slice(i, i + 1)
            part = self._replace(
                q=self.q[:, tokens],
                k=self.k[:, tokens],
                v=self.v[:, tokens],
                decay=_tokens_of(self.decay, tokens),
                decay_v=_tokens_of(self.decay_v, tokens),
                initial_state=None if self.initial_state is None else self.initial_state[row],
                cu_seqlens=None,
            )
            yield part, tokens, row


class States(NamedTuple):
    """One call of ``chunk_states``."""

    k: Tensor
    v: Tensor
    decay: Tensor | None
    decay_v: Tensor | None
    initial_state: Tensor | None
    chunk_size: int
    schedule: str

    @property
    def heads(self) -> int:
        heads = max(self.k.shape[2], self.v.shape[2])
        if self.decay is not None:
            heads = max(heads, self.decay.shape[0 if self.decay.ndim == 1 else 2])
        return heads if self.decay_v is None else max(heads, self.decay_v.shape[2])

    @property
    def states_shape(self) -> tuple[int, int, int, int, int]:
        batch, length = self.k.shape[:2]
        chunks = (length + self.chunk_size - 1) // self.chunk_size
        return batch, self.heads, chunks + 1, self.k.shape[3], self.v.shape[3]


class Step(NamedTuple):
    """One call of ``linear_attention_step``; ``state`` is read and written in place."""

    q: Tensor  # [B, Hq, D]
    k: Tensor  # [B, Hk, D]
    v: Tensor  # [B, Hv, E]
    state: Tensor  # [B, H, D, E]
    decay: Tensor | None  # [H], [B, H] or [B, H, D]
    decay_v: Tensor | None  # [B, H, E]
    scale: float

    @property
    def output_shape(self) -> tuple[int, int, int]:
        batch, heads, _, value_dim = self.state.shape
        return batch, heads, value_dim


class Gradients(NamedTuple):
    """Where a backward pass writes, shaped like the inputs; None for what nobody asked for.

    ``q`` is None for ``chunk_states``. The decays' gradients start as zeros, because :meth:`add_decay` adds to them:
    a per-head decay collects from every sequence. They are in the state's dtype, whatever the decay's own is.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    decay: Tensor | None
    decay_v: Tensor | None
    initial_state: Tensor | None

    def select(self, tokens: slice, row: slice) -> Gradients:
        """The part that belongs to one packed sequence."""
        return Gradients(
            _tokens_of(self.q, tokens),
            _tokens_of(self.k, tokens),
            _tokens_of(self.v, tokens),
            _tokens_of(self.decay, tokens),
            _tokens_of(self.decay_v, tokens),
            None if self.initial_state is None else self.initial_state[row],
        )

    def add_decay(self, da: Tensor, dc: Tensor) -> None:
        """Add per-channel decay gradients ``[B, N, H, D]`` and ``[B, N, H, E]`` in whichever form is asked for."""
        if self.decay is not None:
            channels = da if self.decay.ndim == 4 else da.sum(-1)
            self.decay.add_(channels.sum((0, 1)) if self.decay.ndim == 1 else channels)
        if self.decay_v is not None:
            self.decay_v.add_(dc)


def new_state(state: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A state ``[B, H, D, E]`` to go on from: a copy of the given one, or zeros, for inputs such as ``like``."""
    if state is not None:
        return state.clone()
    return like.new_zeros(shape, dtype=state_dtype(like.dtype))


def share_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat the heads (dimension 2) of ``x`` so that head ``h`` holds what head ``h`` of the call reads."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


def sum_shared_heads(gradient: Tensor, heads: int) -> Tensor:
    """The adjoint of :func:`share_heads`: add up the gradients of the heads that read one shared head."""
    return gradient if gradient.shape[2] == heads else gradient.unflatten(2, (heads, -1)).sum(3)


def _tokens_of(x: Tensor | None, tokens: slice) -> Tensor | None:
    return x if x is None or x.ndim == 1 else x[:, tokens]
