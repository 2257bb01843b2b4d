"""The public function: signature, documentation, checks, and one call."""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.ops.output_gate import custom_op, reference
from fulmen.ops.output_gate.validation import check_gated_attention
from fulmen.runtime.backends import choose
from fulmen.runtime.replay import replayed
from fulmen.runtime.tensors import autocast


@replayed
def output_gated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    *,
    save: tuple[str, ...] = ("kv", "qkv"),
    backend: str = "auto",
) -> Tensor:
    """Linear attention over all keys, with a gate on its output::

        o = gate ⊙ (q · (kᵀ v))          for each sample and head

    The cost is linear in N and M, and gradients flow to all four arguments. Inputs may be views of any strides with a
    dense last dimension (others are copied); results have the strides of their counterparts, so that transposed
    ``[B, H, N, D]`` tensors are read and answered without a copy.

    Args:
        q: ``[B, N, H, D]``; float32, bfloat16, float16 or float64. D and E may be 1 to 512.
        k: ``[B, M, H, D]``, dtype of q.
        v: ``[B, M, H, E]``, dtype of q.
        gate: ``[B, N, H, E]``, dtype of q.
        save: what a forward that will be differentiated keeps for its backward, which recomputes the rest:
            ``()`` nothing, ``("kv",)`` the products kᵀv ``[B, H, D, E]``, ``("kv", "qkv")`` also the ungated output
            ``[B, N, H, E]``. Both are kept in float32 (float64 for float64 inputs), the latter of bfloat16 inputs in
            bfloat16. The reference backend always keeps both.
        backend: a name from :func:`fulmen.backends`, or "auto".

    Returns:
        The output ``[B, N, H, E]`` in q's dtype. q·(kᵀv) is not rounded to 16 bits on the way.

    Raises:
        TypeError, ValueError: before any work, naming the argument, what it was and what it must be.
    """
    q, k, v, gate = autocast(q, k, v, gate)
    check_gated_attention(q, k, v, gate, save)
    backend = choose(backend, q.device, q.dtype)
    if backend == "reference":
        return reference.output_gated_attention(q, k, v, gate)
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, gate))
    keep_kv, keep_qkv = (differentiated and name in save for name in ("kv", "qkv"))
    output, _, _ = custom_op.output_gated_attention(q, k, v, gate, keep_kv, keep_qkv, backend)
    return output
