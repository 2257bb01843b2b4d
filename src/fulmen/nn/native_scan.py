"""Mamba-2's scan as one call of the CPU core: linear attention whose values have weights (dt) and are also added to the
output (D), which the core does to what it weighs anyway. Which calls it takes, and the op ``fulmen::mamba2_scan``; all
others, those with gradients among them, are composed (:mod:`fulmen.nn.mamba2`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fulmen.ops.chunks.decay_form import DecayForm, Decays
from fulmen.ops.chunks.native import Problem, decay
from fulmen.runtime import core as c
from fulmen.runtime.checks import MAX_SIZE
from fulmen.runtime.core_structs import ATTENTION_FORWARD
from fulmen.runtime.library import define
from fulmen.runtime.tensors import in_state_dtype
from fulmen.runtime.torch_private import any_autocast, are_plain


class _Walk(NamedTuple):
    """The scan as a call that walks a state through tokens."""

    k: Tensor
    v: Tensor
    log_decay: Tensor
    initial_state: Tensor | None
    log_decay_v: Tensor | None = None
    schedule: str = "auto"

    @property
    def heads(self) -> int:
        return self.v.shape[2]

    @property
    def decays(self) -> Decays:
        return Decays(DecayForm.of(self.log_decay), DecayForm.of(None))


def takes(
    C: Tensor,
    B: Tensor,
    x: Tensor,
    dt: Tensor,
    log_decay: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> bool:
    """As :func:`scan` has them. Not in pairs of bfloat16: D would be rounded with what it is added to."""
    tensors = [C, B, x, dt, log_decay, *(y for y in (D, initial_state) if y is not None)]
    if (
        c.core is None
        or torch.compiler.is_compiling()
        or (torch.is_grad_enabled() and any(y.requires_grad for y in tensors))
        or any_autocast()
        or not are_plain(tensors)
        or not C.ndim == B.ndim == x.ndim == 4
        or not C.dtype == B.dtype == x.dtype
        or not all(y.dtype in c.DTYPES for y in tensors)
        or (x.dtype == torch.bfloat16 and c.core.multiplies_pairs)
    ):
        return False
    batch, length, heads, channels = x.shape
    groups, size = C.shape[2:]
    rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1 if cu_seqlens.ndim == 1 else -1
    return (
        C.shape == B.shape == (batch, length, groups, size)
        and 0 < groups <= heads
        and heads % groups == 0
        and 0 < size <= MAX_SIZE
        and 0 < channels <= MAX_SIZE
        and dt.shape == log_decay.shape == x.shape[:3]
        and (D is None or D.shape == (heads,))
        and (initial_state is None or initial_state.shape == (rows, heads, size, channels))
        and (cu_seqlens is None or (rows >= 0 and batch == 1 and cu_seqlens.dtype in (torch.int32, torch.int64)))
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
    problem = Problem(_Walk(B, x, log_decay, initial_state), c.header(ATTENTION_FORWARD), C, 1.0, cu_seqlens)
    packed = ATTENTION_FORWARD.pack(
        problem=problem.words,
        output=c.tensor(output),
        final_state=c.state(state) if return_state else c.NO_STATE,
        value_weights=problem.per_token(dt),
        skip=decay(D),
    )
    problem.run(ATTENTION_FORWARD, packed)
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
    state = in_state_dtype(initial_state, x)
    output, state = _op(C, B, x, dt, log_decay, D, state, cu_seqlens, return_state)
    return (output, state) if return_state else output
