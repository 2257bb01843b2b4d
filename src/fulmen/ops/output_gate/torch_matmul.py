"""torch matmuls with the gradient written by hand (the published ``Flao Tor``): portable to every device torch has.

    kv = kᵀ v        qkv = q·kv        o = gate ⊙ qkv
    dgate = do ⊙ qkv    dqkv = do ⊙ gate    dq = dqkv·kvᵀ     dkv = qᵀ dqkv     dk = v·dkvᵀ     dv = k·dkv

As a backend it computes in float32 whatever the inputs are. :func:`attend` is the same in the inputs' own dtype, and
transparent to torch.compile, which then fuses the gate with what surrounds it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulmen.ops.output_gate.problem import Gated, Kept
from fulmen.ops.output_gate.reference import heads_first


def forward(p: Gated, output: Tensor, kept: Kept) -> None:
    q, k, v, gate = map(heads_first, p)
    kv = k.mT @ v
    qkv = q @ kv
    output.copy_((gate * qkv).transpose(1, 2))
    if kept.kv is not None:
        kept.kv.copy_(kv)
    if kept.qkv is not None:
        kept.qkv.copy_(qkv.transpose(1, 2))


def backward(p: Gated, kept: Kept, grad: Tensor, grads: Gated) -> None:
    q, k, v, gate = map(heads_first, p)
    qkv = None if kept.qkv is None else kept.qkv.transpose(1, 2)
    found = gradients(q, k, v, gate, kept.kv, qkv, grad.transpose(1, 2).to(q.dtype))
    for x, into in zip(found, grads, strict=True):
        into.copy_(x.transpose(1, 2))


def gradients(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, kv: Tensor | None, qkv: Tensor | None, do: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and dgate; heads first. What is None is recomputed."""
    if kv is None:
        kv = k.mT @ v
    if qkv is None:
        qkv = q @ kv
    dqkv = do * gate
    dkv = q.mT @ dqkv
    return dqkv @ kv.mT, v @ dkv.mT, k @ dkv, do * qkv


def attend(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, save: tuple[str, ...] = ("kv", "qkv")) -> Tensor:
    """``gate ⊙ (q·(kᵀv))`` in the inputs' dtype; heads first: q ``[..., N, D]``, v ``[..., M, E]``, gate like o."""
    return _HandWritten.apply(q, k, v, gate, "kv" in save, "qkv" in save)


class _HandWritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, keep_kv: bool, keep_qkv: bool) -> Tensor:
        kv = k.mT @ v
        qkv = q @ kv
        ctx.save_for_backward(q, k, v, gate, kv if keep_kv else None, qkv if keep_qkv else None)
        return gate * qkv

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, gate, kv, qkv = ctx.saved_tensors
        return *gradients(q, k, v, gate, kv, qkv, do), None, None
