"""Mamba-2's scan as one call of the CPU core: linear attention whose values have weights (dt) and are also added to the
output (D), which the core does to what it weighs anyway. Which calls it takes, and the op ``fulmen::mamba2_scan``; all
others, those with gradients among them, are composed (:mod:`fulmen.nn.mamba2`)."""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.ops.linear_attention import native
from fulmen.ops.linear_attention.problem import Attention
from fulmen.ops.linear_attention.validation import check_attention
from fulmen.runtime import core as c
from fulmen.runtime.library import define
from fulmen.runtime.tensors import in_state_dtype
from fulmen.runtime.torch_private import any_autocast, are_plain


def takes(C: Tensor, B: Tensor, x: Tensor, dt: Tensor, log_decay: Tensor, D: Tensor | None) -> bool:
    """As :func:`scan` has them. Not in pairs of bfloat16: D would be rounded with what it is added to."""
    tensors = [C, B, x, dt, log_decay] if D is None else [C, B, x, dt, log_decay, D]
    return (
        c.core is not None
        and not torch.compiler.is_compiling()
        and not (torch.is_grad_enabled() and any(y.requires_grad for y in tensors))
        and not any_autocast()
        and are_plain(tensors)
        and all(y.dtype in c.DTYPES for y in tensors)
        and not (x.dtype == torch.bfloat16 and c.core.multiplies_pairs)
        and dt.shape == x.shape[:3]
        and (D is None or D.shape == x.shape[2:3])
    )


def _results(C: Tensor, x: Tensor, cu_seqlens: Tensor | None, return_state: bool) -> tuple[Tensor, Tensor]:
    states = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (states, x.shape[2], C.shape[3], x.shape[3]) if return_state else (0,)
    return x.new_empty(x.shape), x.new_empty(shape, dtype=torch.float32)


def _run(
    C: Tensor,
    B: Tensor,
    x: Tensor,
    dt: Tensor,
    log_decay: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    return_state: bool,
) -> tuple[Tensor, Tensor]:
    output, state = _results(C, x, cu_seqlens, return_state)
    p = Attention(C, B, x, log_decay, None, 1.0, initial_state, cu_seqlens, "auto")
    native.forward(p, output, state if return_state else None, value_weights=dt, skip=D)
    return output, state


_op = define(
    """mamba2_scan(Tensor C, Tensor B, Tensor x, Tensor dt, Tensor log_decay, Tensor? D, Tensor? initial_state,
    Tensor? cu_seqlens, bool return_state) -> (Tensor, Tensor)""",
    _run,
    lambda C, B, x, dt, log_decay, D, initial_state, cu_seqlens, return_state: _results(C, x, cu_seqlens, return_state),
    shared={"D": 1},
)


def scan(
    C: Tensor,
    B: Tensor,
    x: Tensor,
    dt: Tensor,
    log_decay: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    return_state: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """C and B ``[B, N, G, S]``, x ``[B, N, H, P]``, dt and log_decay ``[B, N, H]``, D ``[H]``: the output like x, and
    with ``return_state`` the final state ``[B, H, S, P]``."""
    check_attention(C, B, x, log_decay, None, 1.0, initial_state, return_state, cu_seqlens, "auto")
    state = in_state_dtype(initial_state, x)
    output, state = _op(C, B, x, dt, log_decay, D, state, cu_seqlens, return_state)
    return (output, state) if return_state else output
