"""Packed sequences as transformers names them: ``cu_seq_lens_q`` (which mixers with a gated delta rule hand to it as
``cu_seqlens``), or ``seq_idx`` of each token.

Fulmen packs along N with a batch of 1; rows ``[B, N]`` that each hold several sequences are flattened to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

NAMES = ("seq_idx", "cu_seq_lens_q", "cu_seqlens")


def packed(options: Mapping[str, Any]) -> dict[str, Tensor]:
    """What of a call's keyword arguments says where sequences start."""
    return {name: options[name] for name in NAMES if options.get(name) is not None}


class Packing:
    """Where the sequences of rows ``[B, N]`` start and end.

    ``cu_seqlens``: ``[sequences + 1]`` along the flattened rows.
    """

    def __init__(self, cu_seqlens: Tensor, rows: int, tokens: int) -> None:
        self.cu_seqlens, self.rows, self.tokens = cu_seqlens, rows, tokens

    @staticmethod
    def of(options: Mapping[str, Any], rows: int, tokens: int, *, continues: bool = False) -> Packing | None:
        """From a call's keyword arguments, for rows of so many tokens. None: nothing is packed.

        A call that ``continues`` may have earlier tokens before those that are described; they belong to the first
        sequence of their row.
        """
        given = packed(options)
        if not given:
            return None
        if "seq_idx" in given:
            seq_idx = given["seq_idx"]
            if seq_idx.ndim != 2 or seq_idx.shape[0] != rows:
                raise ValueError(f"seq_idx must be [B, N] with B = {rows}; got shape {list(seq_idx.shape)}")
            starts = torch.ones_like(seq_idx, dtype=torch.bool)
            starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
            cu_seqlens = torch.nonzero(torch.cat((starts.flatten(), starts.new_ones(1)))).flatten()
            described = seq_idx.shape[1]
        else:
            name, cu_seqlens = next((name, x.reshape(-1)) for name, x in given.items())
            described = int(cu_seqlens[-1]) // rows
            ends = torch.arange(rows + 1, device=cu_seqlens.device) * described
            if ends[-1] != cu_seqlens[-1] or not torch.isin(ends, cu_seqlens).all():
                raise ValueError(
                    f"{name} must have a boundary where each of {rows} equal rows ends; got {cu_seqlens.tolist()}"
                )
        context = tokens - described
        if context < 0 or (context > 0 and not continues):
            raise ValueError(f"{' and '.join(given)} must describe {tokens} tokens; got {described}")
        if context > 0:
            row, token = cu_seqlens // described, cu_seqlens % described
            cu_seqlens = cu_seqlens + context * (row + (token != 0))
        return Packing(cu_seqlens, rows, tokens)

    def seq_idx(self) -> Tensor:
        """The index of each token's sequence, ``[B, N]``."""
        tokens = torch.arange(self.rows * self.tokens, device=self.cu_seqlens.device, dtype=self.cu_seqlens.dtype)
        return torch.searchsorted(self.cu_seqlens.contiguous(), tokens, right=True).view(self.rows, self.tokens)

    def flat(self, x: Tensor) -> Tensor:
        """``[B, N, ...]`` as ``[1, B * N, ...]``."""
        return x.flatten(0, 1).unsqueeze(0)

    def rows_of(self, x: Tensor) -> Tensor:
        """``[1, B * N, ...]`` as ``[B, N, ...]``."""
        return x.unflatten(1, (self.rows, self.tokens)).squeeze(0)

    def entering(self, state: Tensor | None) -> Tensor | None:
        """States ``[B, ...]`` that enter the rows, as ``[sequences, ...]``: the first of a row gets its row's."""
        if state is None:
            return None
        states = state.new_zeros(self.cu_seqlens.shape[0] - 1, *state.shape[1:])
        return states.index_copy(0, self._last_that_starts_by(0), state)

    def leaving(self, states: Tensor) -> Tensor:
        """The states ``[B, ...]`` of each row's last sequence, of states ``[sequences, ...]``."""
        return states.index_select(0, self._last_that_starts_by(self.tokens - 1))

    def last_lengths(self) -> Tensor:
        """How many tokens each row's last sequence has had, ``[B]``: more than any if it is the row's first, which may
        have begun in an earlier call."""
        last = self._last_that_starts_by(self.tokens - 1)
        ends = torch.arange(1, self.rows + 1, device=last.device) * self.tokens
        lengths = ends - self.cu_seqlens[last]
        return torch.where(lengths < self.tokens, lengths, torch.iinfo(lengths.dtype).max)

    def _last_that_starts_by(self, token: int) -> Tensor:
        """For each row, the index of its last sequence that starts at this token or before; ``[B]``."""
        starts = self.cu_seqlens[:-1].contiguous()
        tokens = torch.arange(self.rows, device=starts.device, dtype=starts.dtype) * self.tokens + token
        return torch.searchsorted(starts, tokens, right=True) - 1
