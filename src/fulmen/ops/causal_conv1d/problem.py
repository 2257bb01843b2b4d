"""What a call requests, as the backends see it: validated tensors, and where results go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fulmen.ops.chunks.sequences import packed_sequences
from fulmen.runtime.tensors import state_dtype


class Convolution(NamedTuple):
    """One call of ``causal_conv1d``; strides are as given."""

    x: Tensor  # [B, N, C]
    weight: Tensor  # [C, K]
    bias: Tensor | None  # [C]
    activation: str | None
    initial_state: Tensor | None  # [B or sequences, C, W], in x's dtype
    cu_seqlens: Tensor | None

    @property
    def width(self) -> int:
        """W, the inputs that a state holds."""
        return self.weight.shape[1] - 1 if self.initial_state is None else self.initial_state.shape[2]

    @property
    def state_shape(self) -> tuple[int, int, int]:
        states = self.x.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        return states, self.x.shape[2], self.width

    def sequences(self) -> Iterator[tuple[Convolution, slice, slice]]:
        """Each packed sequence as a call of its own, with its slice of the tokens and of the states."""
        if self.cu_seqlens is None:
            yield self, slice(None), slice(None)
            return
        for tokens, row in packed_sequences(self.cu_seqlens, self.x.shape[1]):
            state = None if self.initial_state is None else self.initial_state[row]
            yield self._replace(x=self.x[:, tokens], initial_state=state, cu_seqlens=None), tokens, row

    def inputs(self) -> Tensor:
        """``[B, W + N, C]``, of a call that is not packed: the initial state and then x, in the dtype of arithmetic."""
        batch, _, channels = self.x.shape
        if self.initial_state is None:
            before = self.x.new_zeros(batch, self.width, channels)
        else:
            before = self.initial_state.transpose(1, 2)
        return torch.cat((before, self.x), 1).to(state_dtype(self.x.dtype))


class Step(NamedTuple):
    """One call of ``causal_conv1d_step``; ``state`` is read and written in place."""

    x: Tensor  # [B, C]
    state: Tensor  # [B, C, W]
    weight: Tensor  # [C, K]
    bias: Tensor | None  # [C]
    activation: str | None


class Gradients(NamedTuple):
    """Where a backward pass writes, shaped like the inputs; None for what nobody requests. Those of weight and bias are
    in the state's dtype, and start as zeros, because sequences are added up there; the others are in x's dtype."""

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    initial_state: Tensor | None


class ConvolutionBackend(Protocol):
    """What a backend's module has. Each function fills the results that it is handed."""

    def forward(self, p: Convolution, output: Tensor, state: Tensor | None) -> None: ...

    def backward(
        self, p: Convolution, grad_output: Tensor | None, grad_state: Tensor | None, grads: Gradients
    ) -> None: ...

    def step(self, p: Step, output: Tensor) -> None:
        """Rolls ``p.state`` in place."""
