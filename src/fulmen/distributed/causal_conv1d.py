"""A shard of the convolution: its summary is its last inputs, the halo of the shards after it.

A shard may be shorter than the halo, which then reaches over several ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import fulmen
from fulmen.distributed.fold import Shift, Summary
from fulmen.distributed.places import Place
from fulmen.distributed.recurrence import EnteringGradient
from fulmen.runtime.backends import choose


@dataclass(frozen=True)
class ConvolutionShard:
    """The arguments of ``fulmen.causal_conv1d``; ``cu_seqlens`` is the shard's own, ``width`` that of the states."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    activation: str | None
    cu_seqlens: Tensor | None
    backend: str
    width: int
    place: Place

    @property
    def states(self) -> int:
        return self.x.shape[0]

    def new_states(self, count: int) -> Tensor:
        return self.x.new_empty(count, self.x.shape[2], self.width)

    def summarise(self, initial: Tensor | None = None) -> Summary:
        """Of the shard's last sequence."""
        before = self.new_states(self.states).zero_() if initial is None else initial
        inputs = self.x[:, self.place.tail :]
        last = inputs[:, max(inputs.shape[1] - self.width, 0) :].transpose(1, 2)
        return Summary(Shift(self.place.tokens), torch.cat([before[..., last.shape[2] :], last], 2))

    def run(self, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        return fulmen.causal_conv1d(
            self.x,
            self.weight,
            self.bias,
            activation=self.activation,
            initial_state=initial,
            return_state=True,
            cu_seqlens=self.cu_seqlens,
            backend=self.backend,
        )

    def backward(self) -> tuple[EnteringGradient, tuple[Tensor | None, ...]]:
        """Only the first tokens see the state that enters; what an activation lets through of it depends on it."""
        first = self.x[:, : min(self.place.head, self.weight.shape[1] - 1)]
        backend = choose(self.backend, self.x.device, self.x.dtype)
        gradient = partial(_entering_gradient, self.activation, backend, self.place.head)
        return gradient, (first, self.weight, self.bias)


def _entering_gradient(
    activation: str | None,
    backend: str,
    head: int,
    grad_output: Tensor | None,
    grad_state: Tensor | None,
    entering: Tensor,
    first: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """By the operator's own backward of these tokens; what is left of the state after them only moves on."""
    tokens = first.shape[1]
    return torch.ops.fulmen.causal_conv1d_backward(
        None if grad_output is None else grad_output[:, :tokens],
        None if grad_state is None else Shift(head - tokens).adjoint(grad_state),
        first,
        weight,
        bias,
        activation,
        entering,
        None,
        [False] * 3 + [True],
        backend,
    )[3]
