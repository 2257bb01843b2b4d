"""What a call requests, as the backends see it: validated tensors, and where results go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from torch import Tensor

from fulmen.ops.chunks.decay_form import DecayForm, Decays, tokens_of
from fulmen.ops.chunks.sequences import packed_sequences
from fulmen.runtime.tensors import state_dtype

EPSILON = 1e-6  # beside the sum of squares that normalize_qk divides by


class DeltaRule(NamedTuple):
    """One call of ``delta_rule``."""

    q: Tensor  # [B, N, Hq, D]
    k: Tensor  # [B, N, Hk, D]
    v: Tensor  # [B, N, Hv, E]
    beta: Tensor  # [B, N, H]
    log_decay: Tensor | None  # [H], [B, N, H] or [B, N, H, D]
    normalize_qk: bool
    scale: float
    initial_state: Tensor | None  # [B or sequences, H, D, E]
    cu_seqlens: Tensor | None
    schedule: str

    @property
    def heads(self) -> int:
        return self.beta.shape[2]

    @property
    def log_decay_v(self) -> None:
        """The value axis has no decay here."""
        return

    @property
    def decays(self) -> Decays:
        return Decays(DecayForm.of(self.log_decay))

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        return *self.beta.shape, self.v.shape[3]

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        states = self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        return states, self.heads, self.q.shape[3], self.v.shape[3]

    def sequences(self) -> Iterator[tuple[DeltaRule, slice, slice]]:
        """Each packed sequence as a call of its own, with its slice of the tokens and of the states."""
        if self.cu_seqlens is None:
            yield self, slice(None), slice(None)
            return
        for tokens, row in packed_sequences(self.cu_seqlens, self.q.shape[1]):
            part = self._replace(
                q=self.q[:, tokens],
                k=self.k[:, tokens],
                v=self.v[:, tokens],
                beta=self.beta[:, tokens],
                log_decay=tokens_of(self.log_decay, tokens),
                initial_state=None if self.initial_state is None else self.initial_state[row],
                cu_seqlens=None,
            )
            yield part, tokens, row


class Step(NamedTuple):
    """One call of ``delta_rule_step``; ``state`` is read and written in place."""

    q: Tensor  # [B, Hq, D]
    k: Tensor  # [B, Hk, D]
    v: Tensor  # [B, Hv, E]
    beta: Tensor  # [B, H]
    state: Tensor  # [B, H, D, E]
    log_decay: Tensor | None  # [H], [B, H] or [B, H, D]
    normalize_qk: bool
    scale: float

    @property
    def form(self) -> DecayForm:
        return DecayForm.of(self.log_decay, step=True)

    @property
    def output_shape(self) -> tuple[int, int, int]:
        batch, heads, _, value_size = self.state.shape
        return batch, heads, value_size


class Gradients(NamedTuple):
    """Where a backward pass writes, shaped like the inputs; None for what nobody requests.

    Those of beta, the decay and the state are in the state's dtype; that of the decay starts as zeros, because one per
    head collects from every sequence.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    beta: Tensor | None
    log_decay: Tensor | None
    initial_state: Tensor | None

    def select(self, tokens: slice, row: slice) -> Gradients:
        """The part that belongs to one packed sequence."""
        q, k, v, beta = (None if x is None else x[:, tokens] for x in self[:4])
        initial_state = None if self.initial_state is None else self.initial_state[row]
        return Gradients(q, k, v, beta, tokens_of(self.log_decay, tokens), initial_state)


def normalized(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` ``[..., D]`` over its length, and the reciprocal of that, ``[..., 1]``, both in the state's dtype."""
    x = x.to(state_dtype(x.dtype))
    reciprocal = (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()
    return x * reciprocal, reciprocal


def normalized_backward(gradient: Tensor, unit: Tensor, reciprocal: Tensor) -> Tensor:
    """The gradient of x from that of ``unit``, the x that :func:`normalized` gave."""
    return reciprocal * (gradient - unit * (unit * gradient).sum(-1, keepdim=True))


class DeltaRuleBackend(Protocol):
    """What a backend's module has. Each function fills the results that it is handed."""

    def forward(self, p: DeltaRule, output: Tensor, state: Tensor | None) -> None: ...

    def backward(
        self, p: DeltaRule, grad_output: Tensor | None, grad_state: Tensor | None, grads: Gradients
    ) -> None: ...

    def step(self, p: Step, output: Tensor) -> None:
        """Updates ``p.state`` in place."""
