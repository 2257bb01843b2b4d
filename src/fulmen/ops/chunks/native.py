"""What calls to the CPU core have in common that walk a state through tokens: the words that describe them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fulmen.ops.chunks import segments
from fulmen.ops.chunks.decay_form import DecayForm
from fulmen.ops.chunks.sequences import packed_bounds
from fulmen.runtime import core as c
from fulmen.runtime.core_structs import CODES, PROBLEM, STEP, TENSOR, Struct, Words
from fulmen.runtime.tensors import dense

_SCHEDULES = {name: CODES[name.upper()] for name in ("auto", "recurrent", "loop", "parallel", "recompute")}


class Call(segments.Call, Protocol):
    """What every call on whole sequences has."""

    @property
    def initial_state(self) -> Tensor | None: ...
    @property
    def schedule(self) -> str: ...


class Problem:
    """Such a call as words; keeps alive the tensors that had to be copied for it.

    ``q``, ``scale`` and ``cu_seqlens`` belong to those that read the state.
    """

    def __init__(
        self,
        p: Call,
        header: Words,
        q: Tensor | None = None,
        scale: float = 1.0,
        cu_seqlens: Tensor | None = None,
    ) -> None:
        self._kept: list[Tensor] = []
        self._bounds: tuple[Tensor, int] | None = None
        batch, length, key_heads, key_size = p.k.shape
        _, _, value_heads, value_size = p.v.shape
        sequences = offsets = 0
        if cu_seqlens is not None:
            self._bounds = cu_seqlens.to(torch.int64).contiguous(), length
            sequences, offsets = self._bounds[0].shape[0] - 1, self._bounds[0].data_ptr()
        heads = p.heads
        form, form_v = p.decays
        log_decay = None if p.log_decay is None else self._keep(p.log_decay, form.by_channel)
        self.words = PROBLEM.words(
            header=header,
            batch=batch,
            tokens=length,
            heads=heads,
            query_heads=heads if q is None else q.shape[2],
            key_heads=key_heads,
            value_heads=value_heads,
            key_size=key_size,
            value_size=value_size,
            sequences=sequences,
            cu_seqlens=offsets,
            schedule=_SCHEDULES[p.schedule],
            deterministic=torch.are_deterministic_algorithms_enabled(),
            decay_form=form.value,
            decay_v_form=form_v.value,
            scale=scale,
            q=self.tensor(q),
            k=self.tensor(p.k),
            v=self.tensor(p.v),
            log_decay=decay(log_decay),
            log_decay_v=self.tensor(p.log_decay_v),
            initial_state=c.state(p.initial_state),
        )

    def tensor(self, x: Tensor | None) -> Words:
        if x is None:
            return c.NO_TENSOR
        return c.tensor(x if x.is_contiguous() and x.dtype is not torch.float64 else self._keep(x))

    def per_token(self, x: Tensor) -> Words:
        """``[B, N, H]``."""
        return c.tensor(self._keep(x, channels=False))

    def _keep(self, x: Tensor, channels: bool = True) -> Tensor:
        kept = readable(x, channels)
        if kept is not x:
            self._kept.append(kept)
        return kept

    def run(self, call: Struct, packed: bytes) -> None:
        try:
            c.require().run(call, packed)
        except c.RefusedError as error:
            if error.status == CODES["BAD_SEQUENCES"] and self._bounds:
                packed_bounds(*self._bounds)  # says what is wrong with cu_seqlens
            raise


class Token:
    """One token for every head as the fields of a STEP; keeps alive what had to be copied for them."""

    def __init__(
        self,
        header: Words,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Tensor,
        log_decay: Tensor | None,
        log_decay_v: Tensor | None,
        scale: float,
        output: Tensor,
    ) -> None:
        batch, heads, key_size, value_size = state.shape
        if q.stride()[2] != 1 or k.stride()[2] != 1 or v.stride()[2] != 1:
            q, k, v = dense(q), dense(k), dense(v)
        form, form_v = DecayForm.of(log_decay, step=True), DecayForm.of(log_decay_v, step=True)
        words = words_v = c.NO_TENSOR
        if log_decay is not None:
            log_decay = readable(log_decay, form.by_channel)
            words = token(log_decay) if form.has_tokens else _per_head(log_decay)
        if log_decay_v is not None:
            log_decay_v = readable(log_decay_v)
            words_v = token(log_decay_v)
        self._kept = q, k, v, log_decay, log_decay_v
        self.words = STEP.words(
            header=header,
            batch=batch,
            heads=heads,
            query_heads=q.shape[1],
            key_heads=k.shape[1],
            value_heads=v.shape[1],
            key_size=key_size,
            value_size=value_size,
            decay_form=form.value,
            decay_v_form=form_v.value,
            scale=scale,
            q=token(q),
            k=token(k),
            v=token(v),
            log_decay=words,
            log_decay_v=words_v,
            state=c.state(state),
            output=token(output),
        )


def token(x: Tensor) -> Words:
    """``[B, heads, size]`` or ``[B, heads]``: a tensor without tokens."""
    strides = x.stride()
    return TENSOR.words(
        data=x.data_ptr(), dtype=c.DTYPES[x.dtype], stride_batch=strides[0], stride_token=0, stride_head=strides[1]
    )


def decay(x: Tensor | None) -> Words:
    """A log-decay of any form, or its gradient."""
    return c.tensor(x) if x is None or DecayForm.of(x).has_tokens else _per_head(x)


def _per_head(x: Tensor) -> Words:
    """``[H]``."""
    return TENSOR.words(
        data=x.data_ptr(), dtype=c.DTYPES[x.dtype], stride_batch=0, stride_token=0, stride_head=x.stride()[0]
    )


def readable(x: Tensor, channels: bool = True) -> Tensor:
    """An input as the core can read it: no float64 (which only log-decays and beta may have), and dense along its
    channels."""
    if x.dtype is torch.float64:
        x = x.float()
    return dense(x) if channels else x
