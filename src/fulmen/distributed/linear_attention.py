"""A shard of linear attention: its summary is (total decay, state)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import fulmen
from fulmen.distributed.fold import Diagonal, Summary
from fulmen.distributed.places import Place
from fulmen.distributed.recurrence import EnteringGradient, is_learned, precise
from fulmen.ops.chunks.decay_form import DecayForm, tokens_of
from fulmen.runtime.backends import choose
from fulmen.runtime.tensors import factor, state_dtype


@dataclass(frozen=True)
class AttentionShard:
    """The arguments of ``fulmen.linear_attention``; ``cu_seqlens`` is the shard's own."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    log_decay_v: Tensor | None
    scale: float | None
    cu_seqlens: Tensor | None
    schedule: str
    backend: str
    place: Place

    @property
    def states(self) -> int:
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        return max(x.shape[2] for x in (self.q, self.k, self.v))

    def new_states(self, count: int) -> Tensor:
        shape = count, self.heads, self.q.shape[3], self.v.shape[3]
        return self.q.new_empty(shape, dtype=state_dtype(self.q.dtype))

    def summarise(self, initial: Tensor | None = None) -> Summary:
        """Of the shard's last sequence: the states alone, without outputs, for about a third of the time with them."""
        tail = slice(self.place.tail, None)
        k, v = precise(self._learned, self.k[:, tail], self.v[:, tail])
        a, c = tokens_of(self.log_decay, tail), tokens_of(self.log_decay_v, tail)
        # chunk_states counts the heads of k, v and the decays; those of q may be more.
        if max(k.shape[2], v.shape[2]) < self.heads:
            v = v.repeat_interleave(self.heads // v.shape[2], 2)
        length = k.shape[1]
        states = fulmen.chunk_states(
            k,
            v,
            log_decay=a,
            log_decay_v=c,
            initial_state=initial,
            chunk_size=max(length, 1),
            schedule="auto" if self.schedule == "recompute" else self.schedule,
            backend=self.backend,
        )
        return Summary(Diagonal(self._total(a, length), self._total(c, length)), states[:, :, -1])

    def run(self, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        return fulmen.linear_attention(
            self.q,
            self.k,
            self.v,
            log_decay=self.log_decay,
            log_decay_v=self.log_decay_v,
            scale=self.scale,
            initial_state=initial,
            return_state=True,
            cu_seqlens=self.cu_seqlens,
            schedule=self.schedule,
            backend=self.backend,
        )

    def backward(self) -> tuple[EnteringGradient, tuple[Tensor | None, ...]]:
        head = slice(None, self.place.head)
        backend = choose(self.backend, self.q.device, self.q.dtype)
        options = factor(self.scale, self.q), self.schedule, backend, self._learned
        kept = (
            *(x[:, head] for x in (self.q, self.k, self.v)),
            *(tokens_of(x, head) for x in (self.log_decay, self.log_decay_v)),
        )
        return partial(_entering_gradient, options), kept

    @property
    def _learned(self) -> bool:
        return is_learned(self.log_decay, self.log_decay_v)

    def _total(self, log_decay: Tensor | None, length: int) -> Tensor | None:
        """Of all tokens: ``[states, H, channels]``, or 1 of a scalar one."""
        if log_decay is None:
            return None
        form, dtype = DecayForm.of(log_decay), state_dtype(self.q.dtype)
        if form.has_tokens:
            total = log_decay.sum(1, dtype=dtype)
            return total if form.by_channel else total[..., None]
        total = log_decay.to(dtype) * length if length else torch.zeros_like(log_decay, dtype=dtype)
        return total.expand(self.states, -1)[..., None]


def _entering_gradient(
    options: tuple[float, str, str, bool],
    grad_output: Tensor | None,
    grad_state: Tensor | None,
    entering: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    log_decay_v: Tensor | None,
) -> Tensor:
    """The operator's own backward, of the state that enters alone: it walks the states and nothing else."""
    scale, schedule, backend, learned = options
    q, k, v = precise(learned, q, k, v)
    if grad_output is not None:
        (grad_output,) = precise(learned, grad_output)
    wanted = [False] * 5 + [True]
    gradients = torch.ops.fulmen.linear_attention_backward(
        grad_output, grad_state, q, k, v, log_decay, log_decay_v, scale, entering, None, schedule, wanted, backend
    )
    return gradients[5]
