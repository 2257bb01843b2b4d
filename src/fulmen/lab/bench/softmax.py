"""Softmax attention, the baseline of most tables. Tensors are ``[B, H, N, D]`` unless said otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fulmen.lab.bench.owners import theirs
from fulmen.lab.bench.peers import peer, why_missing
from fulmen.lab.bench.suite import Column, Sizes, Work, tensor_bytes


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """flash-attn on CUDA where it is installed, else torch's own flash kernel, never a fallback."""
    if flash_attn_runs_on(q.device.type):
        return flash_attention_2(q, k, v)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def flash_attn_runs_on(device: str) -> bool:
    return device == "cuda" and not why_missing("flash_attn")


def flash_attention_2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    function = peer("flash_attn.flash_attn_func")
    return function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_by_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """From ``[B, N, H, D]``, as projections give them."""
    return sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def exact_softmax(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """From ``[B, N, H, D]``, plainly."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(later & causal, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def softmax_column(
    name: str, title: str, about: str, pros: str, function: Callable[..., Tensor], *, heads_first: bool = True,
    **others: Any,
) -> Column:  # fmt: skip
    """Of causal attention, as a baseline for what is linear."""
    return Column(
        name, title, about, pros, "O(n²) complexity", ("q", "k", "v"), function, exact_softmax, _least,
        heads_first=heads_first, growth=2, **others,
    )  # fmt: skip


def _least(sizes: Sizes, n: int) -> dict[str, Work]:
    """Half of the scores are not needed."""
    tensor, half_product = tensor_bytes(sizes, n), sizes.batch * sizes.heads * n * n * sizes.dim
    return {"fwd": Work(4 * tensor, 2 * half_product), "bwd": Work(8 * tensor, 5 * half_product)}


# In the other layout; published reports have none.
SDPA_BY_TOKEN = softmax_column(
    "SDPA-BNHD",
    "Softmax attention of torch, by token",
    "softmax attention: torch scaled_dot_product_attention on [B, N, H, D], as projections give it",
    pros="No transposed copies",
    function=sdpa_by_token,
    owner=theirs("torch"),
    heads_first=False,
)
