"""A shard of the delta rule: its summary is (a D×D matrix, state).

The matrix is the state that the shard makes of the identity when its values are zero; the outputs of that run are what
each token reads of the state that enters, so the gradient of that state needs no further walk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

import fulmen
from fulmen.distributed.fold import Matrix, Summary
from fulmen.distributed.places import Place
from fulmen.distributed.recurrence import EnteringGradient, is_learned, precise
from fulmen.ops.chunks.decay_form import tokens_of
from fulmen.runtime.tensors import state_dtype


@dataclass(frozen=True)
class DeltaRuleShard:
    """The arguments of ``fulmen.delta_rule``; ``cu_seqlens`` is the shard's own."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor | None
    normalize_qk: bool
    scale: float | None
    cu_seqlens: Tensor | None
    schedule: str
    backend: str
    place: Place

    @property
    def states(self) -> int:
        return self.q.shape[0]

    def new_states(self, count: int) -> Tensor:
        return self._new(count, self.v.shape[3])

    def summarise(self, initial: Tensor | None = None) -> Summary:
        """Of the shard's last sequence."""
        matrix = self._crossing[1] if self.place.through else self._new(self.states, self.q.shape[3]).zero_()
        tail = slice(self.place.tail, None)
        return Summary(Matrix(matrix), self._run_precisely(tail, self.v[:, tail], initial)[1])

    def run(self, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._run(slice(None), self.q, self.k, self.v, initial, self.cu_seqlens)

    def backward(self) -> tuple[EnteringGradient, tuple[Tensor | None, ...]]:
        return _entering_gradient, self._crossing if self.place.head else (None, None)

    @cached_property
    def _crossing(self) -> tuple[Tensor, Tensor]:
        """What the tokens of the sequence that enters read of each row of the entering state, ``[B, N, H, D]``, and
        what they make of it, ``[B, H, D, D]``."""
        head, size = self.place.head, self.q.shape[3]
        values = self.v.new_zeros(size).expand(self.states, head, self.beta.shape[2], size)
        one = torch.eye(size, dtype=state_dtype(self.q.dtype), device=self.q.device)
        with torch.no_grad():
            states = one.expand(self._new(self.states, size).shape).contiguous()
            return self._run_precisely(slice(None, head), values, states)

    def _run_precisely(self, tokens: slice, values: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = precise(is_learned(self.log_decay), self.q[:, tokens], self.k[:, tokens], values)
        return self._run(tokens, q, k, v, initial)

    def _run(
        self,
        tokens: slice,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        initial: Tensor | None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """q, k and v are of these tokens."""
        return fulmen.delta_rule(
            q,
            k,
            v,
            self.beta[:, tokens],
            log_decay=tokens_of(self.log_decay, tokens),
            normalize_qk=self.normalize_qk,
            scale=self.scale,
            initial_state=initial,
            return_state=True,
            cu_seqlens=cu_seqlens,
            schedule=self.schedule,
            backend=self.backend,
        )

    def _new(self, count: int, columns: int) -> Tensor:
        shape = count, self.beta.shape[2], self.q.shape[3], columns
        return self.q.new_empty(shape, dtype=state_dtype(self.q.dtype))


def _entering_gradient(
    grad_output: Tensor | None, grad_state: Tensor | None, entering: Tensor, reads: Tensor, matrix: Tensor
) -> Tensor:
    gradient = None if grad_state is None else matrix.mT @ grad_state
    if grad_output is not None:
        read = torch.einsum("bnhd,bnhe->bhde", reads.to(matrix.dtype), grad_output.to(matrix.dtype))
        gradient = read if gradient is None else gradient + read
    assert gradient is not None
    return gradient
