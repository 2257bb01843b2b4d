"""Padded rows as packed sequences: what is padding is never computed."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad


class Padding:
    """Where the tokens of padded rows are.

    Args:
        kept: ``[B, N]``, bool: which tokens are none.
    """

    def __init__(self, kept: Tensor) -> None:
        self._shape = kept.shape
        self._places = kept.flatten().nonzero().squeeze(1)
        self.cu_seqlens = pad(kept.sum(1).cumsum(0), (1, 0))  # [B + 1]: each row is a sequence

    @staticmethod
    def of(attention_mask: Tensor) -> Padding | None:
        """Of a mask ``[B, N]`` whose zeros are padding, wherever they are. None: there are none."""
        kept = attention_mask.bool()
        return None if bool(kept.all()) else Padding(kept)

    def remove(self, x: Tensor) -> Tensor:
        """``[B, N, C]`` as ``[1, tokens, C]``."""
        return x.flatten(0, 1).index_select(0, self._places).unsqueeze(0)

    def restore(self, x: Tensor) -> Tensor:
        """``[1, tokens, C]`` as ``[B, N, C]``, with zeros at padding."""
        rows = x.new_zeros(self._shape.numel(), x.shape[2]).index_copy(0, self._places, x[0])
        return rows.unflatten(0, self._shape)
