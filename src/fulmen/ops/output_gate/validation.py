"""Every check of what a caller hands in, before any work is done."""

from __future__ import annotations

from torch import Tensor

from fulmen.runtime.checks import check_inputs, once_per_signature

SAVES = ((), ("kv",), ("kv", "qkv"))


@once_per_signature
def check_gated_attention(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, save: tuple[str, ...]) -> None:
    check_inputs("[B, N, H, D]", q=q, gate=gate)
    check_inputs("[B, M, H, D]", k=k, v=v)
    if k.dtype != q.dtype:
        raise TypeError(f"k must have the dtype of q, {q.dtype}; got {k.dtype}")
    if k.device != q.device:
        raise ValueError(f"k must be on the device of q, {q.device}; got {k.device}")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k must have the same B as q, {list(q.shape)}; got shape {list(k.shape)}")
    if q.shape[2] < 1:
        raise ValueError(f"q must have at least one head; got shape {list(q.shape)}")
    for name, x in (("k", k), ("v", v), ("gate", gate)):
        if x.shape[2] != q.shape[2]:
            raise ValueError(f"{name} must have the heads of q, {q.shape[2]}; got shape {list(x.shape)}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k must have the last dimension of q, {q.shape[3]}; got shape {list(k.shape)}")
    if gate.shape[3] != v.shape[3]:
        raise ValueError(f"gate must have the last dimension of v, {v.shape[3]}; got shape {list(gate.shape)}")
    if save not in SAVES:
        raise ValueError(f"save must be one of {', '.join(map(repr, SAVES))}; got {save!r}")
