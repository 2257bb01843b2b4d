"""Every check of what a caller hands in, before any work is done.

Only attributes of tensors are looked at, never values (that would break torch.compile and synchronise a GPU); the one
exception, :func:`check_lengths`, is called inside the op, and only where the lengths are on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.runtime.checks import MAX_SIZE, check_alike, check_choice, check_scale, once_per_signature

SPLITS = ("auto", "batch", "head", "sequence")


@once_per_signature
def check_decode(
    aq: Tensor,
    ak: Tensor,
    av: Tensor,
    bq: Tensor,
    bk: Tensor,
    bv: Tensor,
    scale: float | None,
    seqlens: Tensor | None,
    split: str,
) -> None:
    factors = {"aq": aq, "ak": ak, "av": av, "bq": bq, "bk": bk, "bv": bv}
    check_alike("", factors)
    check_query(aq, bq)
    check_pair("k", ak, bk)
    check_pair("v", av, bv)
    for name, x in factors.items():
        if x.shape[0] != aq.shape[0]:
            raise ValueError(f"{name} must have the B of aq, {aq.shape[0]}; got shape {list(x.shape)}")
    for name, x in (("av", av), ("bk", bk), ("bv", bv)):
        if x.shape[1] != ak.shape[1]:
            raise ValueError(f"{name} must have the M of ak, {ak.shape[1]}; got shape {list(x.shape)}")
    for name, x in (("ak", ak), ("av", av)):
        if x.shape[2] != aq.shape[2]:
            raise ValueError(f"{name} must have the H of aq, {aq.shape[2]}; got shape {list(x.shape)}")
    if bk.shape[-1] != bq.shape[-1]:
        raise ValueError(f"bk must have the last dimension of bq, D = {bq.shape[-1]}; got shape {list(bk.shape)}")
    check_scale(scale)
    if seqlens is not None:
        check_seqlens(seqlens, aq, "seqlens")
    check_choice("split", split, SPLITS)
    refuse_gradients(factors)


def refuse_gradients(factors: dict[str, Tensor]) -> None:
    for name, x in factors.items():
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(f"{name} must not require grad: tpa_decode has no gradient; call it under torch.no_grad()")


def check_query(aq: Tensor, bq: Tensor) -> None:
    for name, x, letters in (("aq", aq, "[B, 1, H, R]"), ("bq", bq, "[B, 1, R, D]")):
        if x.ndim != 4 or x.shape[1] != 1:
            raise ValueError(f"{name} must have shape {letters}; got {list(x.shape)}")
    if aq.shape[2] < 1:
        raise ValueError(f"aq must have at least one head; got shape {list(aq.shape)}")
    check_size("aq", aq, 3, "R")
    check_size("bq", bq, 3, "D")
    if bq.shape[2] != aq.shape[3]:
        raise ValueError(f"bq must have the R of aq, {aq.shape[3]}; got shape {list(bq.shape)}")


def check_pair(name: str, a: Tensor, b: Tensor) -> None:
    """The two factors of the keys (``name`` "k") or values ("v")."""
    letter = "D" if name == "k" else "E"
    if a.ndim not in (3, 4):
        raise ValueError(f"a{name} must have shape [B, M, H] or [B, M, H, R{name}]; got {list(a.shape)}")
    if b.ndim != a.ndim:
        wanted = f"[B, M, {letter}]" if a.ndim == 3 else f"[B, M, R{name}, {letter}]"
        raise ValueError(f"b{name} must have shape {wanted} beside a{name} {list(a.shape)}; got {list(b.shape)}")
    check_size(f"b{name}", b, b.ndim - 1, letter)
    if a.ndim == 4:
        check_size(f"a{name}", a, 3, f"R{name}")
        if b.shape[2] != a.shape[3]:
            raise ValueError(f"b{name} must have the R{name} of a{name}, {a.shape[3]}; got shape {list(b.shape)}")


def check_size(name: str, x: Tensor, dim: int, letter: str) -> None:
    if not 1 <= x.shape[dim] <= MAX_SIZE:
        raise ValueError(f"{name} must have {letter} of 1 to {MAX_SIZE}; got shape {list(x.shape)}")


def check_seqlens(seqlens: Tensor, factor: Tensor, name: str) -> None:
    """A length for each sample of ``factor``; ``name`` is for the message."""
    if not isinstance(seqlens, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None; got {type(seqlens).__name__}")
    if seqlens.device != factor.device:
        raise ValueError(f"{name} must be on the device of the factors, {factor.device}; got {seqlens.device}")
    if seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64; got {seqlens.dtype}")
    if seqlens.shape != factor.shape[:1]:
        raise ValueError(f"{name} must have shape [B] = {list(factor.shape[:1])}; got {list(seqlens.shape)}")


def check_lengths(seqlens: Tensor, tokens: int) -> None:
    """The values of ``seqlens``, which must be on the CPU."""
    for i, length in enumerate(seqlens.tolist()):
        if not 0 <= length <= tokens:
            raise ValueError(f"seqlens must be 0 to M = {tokens}; got {length} at entry {i}")
