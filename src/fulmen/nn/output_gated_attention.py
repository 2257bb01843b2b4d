"""Linear attention over all tokens, before and after, with an output gate: for encoders."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

import fulmen
from fulmen.nn.call import check_tokens
from fulmen.nn.linear import Linear
from fulmen.nn.mixer import check_heads
from fulmen.nn.norms import RMSNorm
from fulmen.ops.chunks.sequences import packed_sequences
from fulmen.runtime.checks import check_count


class OutputGatedAttention(nn.Module):
    """``o_proj(norm(SiLU(g_proj(x)) · q (kᵀ v)))``, q and k with SiLU. Not causal, so there is nothing to cache.

    Args:
        hidden_size: of the tokens.
        num_heads: H; of ``hidden_size / num_heads`` channels.
        save: what a forward keeps for its backward, as of :func:`fulmen.output_gated_attention`.
        norm_eps: of the norm, over a head. It is also what makes the number of tokens not matter.
    """

    def __init__(
        self, hidden_size: int, num_heads: int = 8, *, save: tuple[str, ...] = ("kv",), norm_eps: float = 1e-5
    ) -> None:
        super().__init__()
        check_count("hidden_size", hidden_size)
        check_count("num_heads", num_heads)
        check_heads(hidden_size=hidden_size, num_heads=num_heads)
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, hidden_size // num_heads
        self.save = save
        self.q_proj = Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = Linear(hidden_size, hidden_size, bias=False)
        self.v_proj = Linear(hidden_size, hidden_size, bias=False)
        self.g_proj = Linear(hidden_size, hidden_size, bias=False)
        self.norm = RMSNorm(self.head_dim, norm_eps)
        self.o_proj = Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None, attention_mask: Tensor | None = None) -> Tensor:
        """
        Args:
            x: ``[B, N, hidden_size]``.
            cu_seqlens: ``[sequences + 1]``: where each of several sequences packed along N starts, and N; B must be 1.
            attention_mask: ``[B, N]``: 0 where x is padding. No other token sees it, and the output is 0 there.

        Returns:
            ``[B, N, hidden_size]``.
        """
        check_tokens(x, self.hidden_size, cu_seqlens, attention_mask)
        if attention_mask is not None:  # keys of 0 add nothing, and a gate of 0 closes
            x = x.masked_fill(~attention_mask.bool().unsqueeze(-1), 0.0)
        q, k, gate = (silu(project(x)) for project in (self.q_proj, self.k_proj, self.g_proj))
        q, k, v, gate = (y.unflatten(-1, (self.num_heads, -1)) for y in (q, k, self.v_proj(x), gate))
        if cu_seqlens is None:
            attention = fulmen.output_gated_attention(q, k, v, gate, save=self.save)
        else:
            attention = torch.cat(
                [
                    fulmen.output_gated_attention(*(y[:, tokens] for y in (q, k, v, gate)), save=self.save)
                    for tokens, _ in packed_sequences(cu_seqlens, x.shape[1])
                ],
                dim=1,
            )
        return self.o_proj(self.norm(attention).flatten(2))

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, heads={self.num_heads}, key size={self.head_dim}, value size={self.head_dim}"
