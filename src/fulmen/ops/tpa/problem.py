"""What a call requests, as the backends see it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fulmen.runtime.tensors import factor, state_dtype


class Decode(NamedTuple):
    """One call of ``tpa_decode``; factors of rank one have a dimension of rank too."""

    aq: Tensor  # [B, 1, H, R]
    ak: Tensor  # [B, M, H, Rk]
    av: Tensor  # [B, M, H, Rv]
    bq: Tensor  # [B, 1, R, D]
    bk: Tensor  # [B, M, Rk, D]
    bv: Tensor  # [B, M, Rv, E]
    scale: float
    seqlens: Tensor | None  # [B]
    split: str

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        return self.aq.shape[0], 1, self.aq.shape[2], self.bv.shape[3]

    @property
    def tokens(self) -> int:
        return self.ak.shape[1]

    @property
    def ranks(self) -> tuple[int, int, int]:
        """R, Rk and Rv."""
        return self.aq.shape[3], self.ak.shape[3], self.av.shape[3]

    def padding(self) -> Tensor | None:
        """``[B, M]``: which tokens are after the end of their sample; None if none can be."""
        if self.seqlens is None:
            return None
        return torch.arange(self.tokens, device=self.ak.device) >= self.seqlens[:, None]

    def in_state_dtype(self) -> Decode:
        """The call with factors in the dtype of all arithmetic."""
        aq, ak, av, bq, bk, bv = (x.to(state_dtype(x.dtype)) for x in self[:6])
        return self._replace(aq=aq, ak=ak, av=av, bq=bq, bk=bk, bv=bv)


class DecodeBackend(Protocol):
    """What a backend's module has."""

    def forward(self, p: Decode, output: Tensor) -> None:
        """Fills the result."""


def decode_of(
    aq: Tensor,
    ak: Tensor,
    av: Tensor,
    bq: Tensor,
    bk: Tensor,
    bv: Tensor,
    scale: float | None = None,
    seqlens: Tensor | None = None,
    split: str = "auto",
) -> Decode:
    """The call from its arguments, which have been checked."""
    if ak.ndim == 3:
        ak, bk = ak.unsqueeze(3), bk.unsqueeze(2)
    if av.ndim == 3:
        av, bv = av.unsqueeze(3), bv.unsqueeze(2)
    return Decode(aq, ak, av, bq, bk, bv, factor(scale, bq), seqlens, split)
