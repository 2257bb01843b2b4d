"""What a call requests, as the backends see it: validated tensors, and where results go."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Gated(NamedTuple):
    """One call of ``output_gated_attention``; strides are as given."""

    q: Tensor  # [B, N, H, D]
    k: Tensor  # [B, M, H, D]
    v: Tensor  # [B, M, H, E]
    gate: Tensor  # [B, N, H, E]

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        batch, _, heads, key_size = self.k.shape
        return batch, heads, key_size, self.v.shape[3]


class Kept(NamedTuple):
    """The intermediates; None for what is not kept."""

    kv: Tensor | None  # [B, H, D, E], the state's dtype
    qkv: Tensor | None  # [B, N, H, E], the same, or bfloat16 where the inputs are


class GateBackend(Protocol):
    """What a backend's module has. Each function fills the results that it is handed."""

    def forward(self, p: Gated, output: Tensor, kept: Kept) -> None: ...

    def backward(self, p: Gated, kept: Kept, grad: Tensor, grads: Gated) -> None: ...
