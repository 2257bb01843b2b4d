"""What a call requests, as the backends see it: validated tensors, and where results go.

The ops (:mod:`fulmen.ops.linear_attention.custom_op`) allocate every result; a backend only fills what it is handed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from torch import Tensor

from fulmen.ops.chunks.decay_form import DecayForm, Decays, tokens_of
from fulmen.ops.chunks.sequences import packed_sequences


class Attention(NamedTuple):
    """One call of ``linear_attention``."""

    q: Tensor  # [B, N, Hq, D]
    k: Tensor  # [B, N, Hk, D]
    v: Tensor  # [B, N, Hv, E]
    log_decay: Tensor | None  # [H], [B, N, H] or [B, N, H, D]
    log_decay_v: Tensor | None  # [B, N, H, E]
    scale: float
    initial_state: Tensor | None  # [B or sequences, H, D, E]
    cu_seqlens: Tensor | None
    schedule: str

    @property
    def heads(self) -> int:
        return max(self.q.shape[2], self.k.shape[2], self.v.shape[2])

    @property
    def decays(self) -> Decays:
        return Decays(DecayForm.of(self.log_decay), DecayForm.of(self.log_decay_v))

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
        for tokens, row in packed_sequences(self.cu_seqlens, self.q.shape[1]):
            part = self._replace(
                q=self.q[:, tokens],
                k=self.k[:, tokens],
                v=self.v[:, tokens],
                log_decay=tokens_of(self.log_decay, tokens),
                log_decay_v=tokens_of(self.log_decay_v, tokens),
                initial_state=None if self.initial_state is None else self.initial_state[row],
                cu_seqlens=None,
            )
            yield part, tokens, row


class States(NamedTuple):
    """One call of ``chunk_states``."""

    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    log_decay_v: Tensor | None
    initial_state: Tensor | None
    chunk_size: int
    schedule: str

    @property
    def heads(self) -> int:
        decays = (DecayForm.of(x).heads(x) for x in (self.log_decay, self.log_decay_v) if x is not None)
        return max(self.k.shape[2], self.v.shape[2], *decays)

    @property
    def decays(self) -> Decays:
        return Decays(DecayForm.of(self.log_decay), DecayForm.of(self.log_decay_v))

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
    log_decay: Tensor | None  # [H], [B, H] or [B, H, D]
    log_decay_v: Tensor | None  # [B, H, E]
    scale: float

    @property
    def form(self) -> DecayForm:
        """Of ``log_decay``; ``log_decay_v`` is per channel if there is one."""
        return DecayForm.of(self.log_decay, step=True)

    @property
    def output_shape(self) -> tuple[int, int, int]:
        batch, heads, _, value_size = self.state.shape
        return batch, heads, value_size


class Gradients(NamedTuple):
    """Where a backward pass writes, shaped like the inputs; None for what nobody requests.

    ``q`` is None for ``chunk_states``. The decays' gradients start as zeros, because :meth:`add_decay` adds to them:
    one per head collects from every sequence. They and that of the state are in the state's dtype.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    log_decay: Tensor | None
    log_decay_v: Tensor | None
    initial_state: Tensor | None

    def select(self, tokens: slice, row: slice) -> Gradients:
        """The part that belongs to one packed sequence."""
        return Gradients(
            None if self.q is None else self.q[:, tokens],
            None if self.k is None else self.k[:, tokens],
            None if self.v is None else self.v[:, tokens],
            tokens_of(self.log_decay, tokens),
            tokens_of(self.log_decay_v, tokens),
            None if self.initial_state is None else self.initial_state[row],
        )

    def add_decay(self, da: Tensor, dc: Tensor) -> None:
        """Add decay gradients of every channel, ``[B, N, H, D]`` and ``[B, N, H, E]``, in the form of each."""
        for into, gradient in ((self.log_decay, da), (self.log_decay_v, dc)):
            if into is not None:
                into.add_(DecayForm.of(into).reduced(gradient))


class AttentionBackend(Protocol):
    """What a backend's module has. Each function fills the results that it is handed."""

    def forward(self, p: Attention, output: Tensor, state: Tensor | None) -> None: ...

    def backward(
        self, p: Attention, grad_output: Tensor | None, grad_state: Tensor | None, grads: Gradients
    ) -> None: ...

    def step(self, p: Step, output: Tensor) -> None:
        """Updates ``p.state`` in place."""

    def states_forward(self, p: States, states: Tensor) -> None: ...

    def states_backward(self, p: States, states: Tensor, grad_states: Tensor, grads: Gradients) -> None: ...
