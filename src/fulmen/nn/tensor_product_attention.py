"""Tensor-product attention (TPA): softmax attention whose queries, keys and values are sums of products of factors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import fulmen
from fulmen.nn.call import Call
from fulmen.nn.linear import Linear
from fulmen.nn.mixer import Mixer
from fulmen.nn.rotary import rotate
from fulmen.ops.chunks.sequences import packed_sequences
from fulmen.runtime.checks import check_count


class TensorProductAttention(Mixer):
    """``o_proj(softmax attention)``, q = Σ_r aq_r ⊗ bq_r / R and k, v alike, with rotary positions on bq and bk.

    Its cache keeps the factors of all tokens, and so it grows: by (2 H + D + E) · rank numbers for a token, in place of
    H · (D + E). Training and a prompt form q, k and v; a decoded token does not (:func:`fulmen.tpa_decode`).

    Args:
        hidden_size: of the tokens.
        num_heads: H. head_dim: D and E.
        q_rank, rank: of the queries, and of the keys and values.
        rope_base: of the rotary positions; None: there are none.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 8,
        head_dim: int = 64,
        *,
        q_rank: int = 6,
        rank: int = 2,
        rope_base: float | None = 10000.0,
    ) -> None:
        super().__init__()
        sizes = {"num_heads": num_heads, "head_dim": head_dim, "q_rank": q_rank, "rank": rank}
        for name, count in {"hidden_size": hidden_size, **sizes}.items():
            check_count(name, count)
        if rope_base is not None and head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions; got {head_dim}")
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, head_dim
        self.q_rank, self.rank, self.rope_base = q_rank, rank, rope_base
        self.W_A_q = Linear(hidden_size, num_heads * q_rank, bias=False)
        self.W_A_k = Linear(hidden_size, num_heads * rank, bias=False)
        self.W_A_v = Linear(hidden_size, num_heads * rank, bias=False)
        self.W_B_q = Linear(hidden_size, q_rank * head_dim, bias=False)
        self.W_B_k = Linear(hidden_size, rank * head_dim, bias=False)
        self.W_B_v = Linear(hidden_size, rank * head_dim, bias=False)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, bias=False)

    def mix(self, x: Tensor, call: Call) -> Tensor:
        call.refuse_group("tensor-product attention")
        attention = self._attention(x.unsqueeze(1) if call.steps else x, call)
        return self.o_proj(attention.squeeze(1) if call.steps else attention)

    def _attention(self, x: Tensor, call: Call) -> Tensor:
        """``[B, N, hidden_size]`` to ``[B, N, H · E]``."""
        if call.cache is not None and torch.is_grad_enabled():
            raise ValueError("cache must be None where gradients are recorded: call the layer under torch.no_grad()")
        aq, ak, av = (a(x).unflatten(-1, (self.num_heads, -1)) for a in (self.W_A_q, self.W_A_k, self.W_A_v))
        bq, bk, bv = (b(x).unflatten(-1, (-1, self.head_dim)) for b in (self.W_B_q, self.W_B_k, self.W_B_v))
        past = _past(call)
        row, places = _places(x, call.cu_seqlens)
        if self.rope_base is not None:
            before = 0 if past is None or past.rows is None else past.lengths[row]
            bq, bk = (rotate(b, places + before, self.rope_base) for b in (bq, bk))
        if past is None or past.rows is None:
            attention = _attend(aq, bq, (ak, av, bk, bv), call.cu_seqlens)
            if past is not None:
                _append(past, (ak, av, bk, bv), row, places, call.cu_seqlens)
        else:
            _append(past, (ak, av, bk, bv), row, places, call.cu_seqlens)
            attention = past.decode(aq, bq) if call.steps else _attend_to_past(aq, bq, past, call.cu_seqlens)
        return attention.flatten(2)

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, heads={self.num_heads}, key size={self.head_dim}, value size={self.head_dim}, "
            f"rank of q={self.q_rank}, of k and v={self.rank}"
        )


def _past(call: Call) -> fulmen.TPACache | None:
    if call.cache is None:
        return None
    if call.cache.factors is None:
        if call.goes_on:
            raise call.foreign_cache("factors")
        call.cache.factors = fulmen.TPACache()
    return call.cache.factors


Factors = tuple[Tensor, Tensor, Tensor, Tensor]  # ak, av, bk, bv


def _places(x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of each token of ``[B, N, ...]``, its sequence and its place in it; they broadcast to ``[B, N]``."""
    tokens = torch.arange(x.shape[1], device=x.device)
    if cu_seqlens is None:
        return torch.arange(x.shape[0], device=x.device)[:, None], tokens[None]
    row = torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)
    return row[None], (tokens - cu_seqlens[row])[None]


def _append(past: fulmen.TPACache, new: Factors, row: Tensor, places: Tensor, cu_seqlens: Tensor | None) -> None:
    if cu_seqlens is None:
        past.append(*new)
        return
    lengths = cu_seqlens.diff()
    longest = int(lengths.max())

    def padded(x: Tensor) -> Tensor:
        rows = x.new_zeros(lengths.shape[0], longest, *x.shape[2:])
        rows[row, places] = x
        return rows

    ak, av, bk, bv = map(padded, new)
    past.append(ak, av, bk, bv, lengths=lengths)


def _attend(aq: Tensor, bq: Tensor, factors: Factors, cu_seqlens: Tensor | None) -> Tensor:
    """Tokens to those before them, each sequence by itself; ``[B, N, H, E]``."""
    if cu_seqlens is None:
        return _softmax_attention(aq, bq, factors)
    parts = []
    for tokens, _ in packed_sequences(cu_seqlens, aq.shape[1]):
        ak, av, bk, bv = (x[:, tokens] for x in factors)
        parts.append(_softmax_attention(aq[:, tokens], bq[:, tokens], (ak, av, bk, bv)))
    return torch.cat(parts, dim=1)


def _attend_to_past(aq: Tensor, bq: Tensor, past: fulmen.TPACache, cu_seqlens: Tensor | None) -> Tensor:
    """Several tokens of each sequence to all before them in the cache, where they are themselves; ``[B, N, H, E]``."""
    lengths = past.lengths.tolist()
    if cu_seqlens is None and len({*lengths}) <= 1:
        return _softmax_attention(aq, bq, past.factors)
    if cu_seqlens is None:
        spans = [(slice(i, i + 1), slice(None)) for i in range(len(lengths))]
    else:
        spans = [(slice(0, 1), tokens) for tokens, _ in packed_sequences(cu_seqlens, aq.shape[1])]
    parts = []
    for i, span in enumerate(spans):
        ak, av, bk, bv = (x[i : i + 1, : lengths[i]] for x in past.factors)
        parts.append(_softmax_attention(aq[span], bq[span], (ak, av, bk, bv)))
    return torch.cat(parts, dim=0 if cu_seqlens is None else 1)


def _softmax_attention(aq: Tensor, bq: Tensor, factors: Factors) -> Tensor:
    """The last N of M tokens, q ``[B, N, H, D]``, to those before them; ``[B, N, H, E]``."""
    ak, av, bk, bv = factors
    q, k, v = ((a @ b / a.shape[-1]).transpose(1, 2) for a, b in ((aq, bq), (ak, bk), (av, bv)))
    n, m = q.shape[2], k.shape[2]
    mask = None if n == m else torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
    output = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return output.transpose(1, 2)
