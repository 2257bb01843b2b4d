"""The public function: signature, documentation, checks, and one call."""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.backends import choose
from fulmen.output_gate import (
    ops,  # noqa: F401  (registers torch.ops.fulmen.*)
    reference,
)
from fulmen.output_gate.validation import check_gated_attention
from fulmen.tensors import autocast


def output_gated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    cache: tuple[str, ...] = ("kv", "qkv"),
    backend: str = "auto",
) -> Tensor:
    """Linear attention over all keys, with a gate on its output::

        o = g ⊙ (q · (kᵀ v))          for each sample and head

    The cost is linear in N and M, and gradients flow to all four arguments. Inputs may be views of any strides with a
    dense last dimension (others are copied); results have the strides of their counterparts, so that transposed
    ``[B, H, N, D]`` tensors are read and answered without a copy.

    Args:
        q: ``[B, N, H, D]``; float32, bfloat16, float16 or float64. D and E may be 1 to 512.
        k: ``[B, M, H, D]``, dtype of q.
        v: ``[B, M, H, E]``, dtype of q.
        g: the gate ``[B, N, H, E]``, dtype of q.
        cache: what a forward that will be differentiated keeps for its backward, which computes the rest again:
            ``()`` nothing, ``("kv",)`` the products kᵀv ``[B, H, D, E]``, ``("kv", "qkv")`` also the ungated output
            ``[B, N, H, E]``. Both are kept in float32 (float64 for float64 inputs).
            The reference backend always keeps both.
        backend: a name from :func:`fulmen.backends`, or "auto".

    Returns:
        The output ``[B, N, H, E]`` in q's dtype. kᵀv and q·(kᵀv) are never rounded to 16 bits on the way.

    Raises:
        TypeError, ValueError: before any work, naming the argument, what it was and what it must be.
    """
    q, k, v, g = autocast(q, k, v, g)
    check_gated_attention(q, k, v, g, cache)
    backend = choose(backend, q.device, q.dtype)
    if backend == "reference":
        return reference.output_gated_attention(q, k, v, g)
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, g))
    keep_kv, keep_qkv = (differentiated and name in cache for name in ("kv", "qkv"))
    output, _, _ = torch.ops.fulmen.output_gated_attention.default(q, k, v, g, keep_kv, keep_qkv, backend)
    return output
