"""Launching the kernels: what the launches of one call have in common, and one method for each kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from fulmen.ops.chunks.decay_form import DecayForm
from fulmen.ops.delta_rule.problem import DeltaRule
from fulmen.ops.delta_rule.triton.gradients import differentiate, finish
from fulmen.ops.delta_rule.triton.prepare import FACTORS, prepare
from fulmen.ops.delta_rule.triton.recurrent import recur
from fulmen.ops.delta_rule.triton.tiles import (
    VALUES_AT_ONCE,
    chunk_size,
    finish_tile,
    gradient_tile,
    prepare_tile,
    recurrent_tile,
    walk_tile,
)
from fulmen.ops.delta_rule.triton.walk import walk, walk_backward
from fulmen.runtime.architectures import Architecture, architecture_of
from fulmen.triton_common import operands
from fulmen.triton_common.operands import Partition, States, Tokens
from fulmen.triton_common.tiles import Tile, padded


class Prepared(NamedTuple):
    """What :func:`~fulmen.ops.delta_rule.triton.prepare.prepare` finds of all chunks, a row for each token."""

    inverse: Tensor  # X [B, N, H, C]
    scores: Tensor  # M
    overlaps: Tensor | None  # L, for the gradient of a decay that channels share
    factors: Tensor  # [B, N, H, 4]
    totals: Tensor | None  # [B, chunks, H, D or 1]; None without decay
    reads: Tensor  # R [B, N, H, D]
    q_in: Tensor  # q and k, or what a channel decay weighs: later(q) and earlier(k) [B, N, H, D]
    k_out: Tensor


class Launcher:
    """
    Args:
        precision: of products of 16-bit inputs; see :mod:`fulmen.triton_common.products`.
    """

    def __init__(self, p: DeltaRule, precision: str) -> None:
        self.p, self.heads, self.form = p, p.heads, DecayForm.of(p.log_decay)
        batch, length, _, self.key_size = p.q.shape
        self.value_size, self.sequences = p.v.shape[3], p.state_shape[0]
        self.architecture: Architecture = architecture_of(p.q.device)
        self.decay_name = self.form.name.lower()
        self.precision = self.architecture.single if p.q.dtype == torch.float32 else precision
        self.kept = torch.bfloat16 if self.precision == "one term" else torch.float32
        self.chunk = chunk_size(p.q.dtype, self.key_size)
        self.partition = Partition(p.cu_seqlens, length, 1, length)
        # Of a sample, or of all packed sequences: there some numbers may have no chunk.
        packed = p.cu_seqlens is not None
        self.chunks = length // self.chunk + self.sequences if packed else triton.cdiv(length, self.chunk)
        self.batch = batch

    @property
    def levels(self) -> int:
        """How often blocks of one token are merged in pairs until they are a chunk."""
        return self.chunk.bit_length() - 1

    @property
    def walk_tile(self) -> Tile:
        return walk_tile(self.architecture, self.chunk, self.key_size, self.value_size, self.precision)

    @property
    def gradient_tile(self) -> Tile:
        return gradient_tile(self.architecture, self.chunk, self.key_size, self.precision)

    @property
    def value_tiles(self) -> int:
        return triton.cdiv(self.value_size, self.walk_tile.width)

    @property
    def key_tiles(self) -> int:
        return triton.cdiv(self.key_size, self.gradient_tile.width)

    def new_rows(self, size: int, dtype: torch.dtype | None = None) -> Tensor:
        """``[B, N, H, size]``, in the dtype of factors of products with a state if none is given."""
        return self.p.v.new_empty(*self.p.beta.shape, size, dtype=dtype or self.kept)

    def new_states(self) -> Tensor:
        """For a state of every chunk, ``[B, H, chunks, D, E]``."""
        shape = self.batch, self.heads, self.chunks, self.value_size, self.key_size
        return self.p.v.new_empty(shape, dtype=self.kept).mT

    def prepare(self, backward: bool = False, with_overlaps: bool = False) -> Prepared:
        p, channel = self.p, self.form.by_channel
        q_in, k_out = (self.new_rows(self.key_size) if channel else None for _ in range(2))
        totals = None
        if self.form is not DecayForm.NONE:
            shape = self.batch, self.chunks, self.heads, self.key_size if channel else 1
            totals = p.v.new_empty(shape, dtype=torch.float32)
        found = Prepared(
            inverse=self.new_rows(self.chunk, torch.float32),
            scores=self.new_rows(self.chunk, torch.float32),
            overlaps=self.new_rows(self.chunk, torch.float32) if with_overlaps else None,
            factors=self.new_rows(FACTORS, torch.float32),
            totals=totals,
            reads=self.new_rows(self.key_size, torch.float32 if backward else None),
            q_in=p.q if q_in is None else q_in,
            k_out=p.k if k_out is None else k_out,
        )
        tile = prepare_tile(self.architecture, self.chunk, self.key_size, channel)
        programs = self.batch * self.chunks * self.heads
        if programs == 0:
            return found
        prepare[(programs,)](
            self.tokens(p.q), self.tokens(p.k), self.tokens(p.beta[..., None]), self.log_decay(),
            self.tokens(found.inverse), self.tokens(found.scores), self.tokens(found.overlaps),
            self.tokens(found.factors), self.tokens(found.totals),
            self.tokens(found.reads), self.tokens(q_in), self.tokens(k_out),
            *self.partition, self.chunks, self.sequences, self.heads, p.scale,
            C=self.chunk, K=tile.width, LEVELS=self.levels, DECAY=self.decay_name, NORMALIZE=p.normalize_qk,
            PRECISION=self.precision, SINGLE=self.architecture.single, **tile.options,
        )  # fmt: skip
        return found

    def walk(
        self,
        x: Prepared,
        leaving: Tensor | None,
        *,
        output: Tensor | None = None,
        states: Tensor | None = None,
        errors: Tensor | None = None,
    ) -> None:
        p, tile = self.p, self.walk_tile
        programs = self.sequences * self.heads * self.value_tiles
        if programs == 0:
            return
        walk[(programs,)](
            self.tokens(None if output is None else x.q_in), self.tokens(x.k_out), self.tokens(x.reads),
            self.tokens(p.v), self.tokens(p.beta[..., None]),
            self.tokens(x.inverse), self.tokens(None if output is None else x.scores),
            self.tokens(x.factors), self.tokens(x.totals),
            self.states(operands.readable_state(p.initial_state)), self.states(leaving),
            self.tokens(output), self.states(states), self.tokens(errors),
            *self.partition, self.heads,
            C=self.chunk, D=padded(self.key_size), W=tile.width, DECAY=self.decay_name, PRECISION=self.precision,
            **tile.options,
        )  # fmt: skip

    def walk_backward(
        self,
        x: Prepared,
        grad: Tensor,
        errors: Tensor,
        entering: Tensor | None,
        leaving: Tensor | None,
        grad_states: Tensor,
        dv: Tensor,
        dbeta: Tensor | None,
    ) -> None:
        tile = self.walk_tile
        programs = self.sequences * self.heads * self.value_tiles
        if programs == 0:
            return
        walk_backward[(programs,)](
            self.tokens(x.q_in), self.tokens(x.k_out), self.tokens(x.reads), self.tokens(grad),
            self.tokens(self.p.beta[..., None]), self.tokens(x.inverse), self.tokens(x.scores),
            self.tokens(x.factors), self.tokens(x.totals), self.tokens(errors),
            self.states(operands.readable_state(entering)), self.states(leaving),
            self.states(grad_states), self.tokens(dv), self.tokens(dbeta),
            *self.partition, self.heads,
            C=self.chunk, D=padded(self.key_size), W=tile.width, DECAY=self.decay_name, PRECISION=self.precision,
            **tile.options,
        )  # fmt: skip

    def differentiate(
        self,
        x: Prepared,
        grad: Tensor,
        dv: Tensor,
        errors: Tensor,
        states: Tensor,
        grad_states: Tensor,
        dq: Tensor | None,
        dk: Tensor | None,
        ddecay: Tensor | None,
    ) -> None:
        p, tile = self.p, self.gradient_tile
        programs = self.batch * self.chunks * self.heads * self.key_tiles
        if programs == 0:
            return
        differentiate[(programs,)](
            self.tokens(p.q), self.tokens(p.k), self.log_decay(), self.tokens(p.beta[..., None]),
            self.tokens(grad), self.tokens(dv), self.tokens(errors), self.tokens(x.scores), self.tokens(x.overlaps),
            self.tokens(x.factors), self.tokens(x.totals), self.states(states), self.states(grad_states),
            self.tokens(dq), self.tokens(dk), self.tokens(ddecay),
            *self.partition, self.chunks, self.sequences, self.heads,
            C=self.chunk, K=tile.width, W=min(padded(self.value_size), VALUES_AT_ONCE), LEVELS=self.levels,
            DECAY=self.decay_name, PRECISION=self.precision, **tile.options,
        )  # fmt: skip

    def finish(self, of_heads: Tensor, x: Tensor, into: Tensor, normalized: bool) -> None:
        """The gradient of ``x`` from that of every head."""
        batch, length, heads, size = x.shape
        tile = finish_tile(size)
        programs = batch * triton.cdiv(length, tile.chunk) * heads
        if programs == 0:
            return
        finish[(programs,)](
            self.tokens(of_heads), self.tokens(x), self.tokens(into), length, heads,
            C=tile.chunk, D=tile.width, NORMALIZE=normalized, **tile.options,
        )  # fmt: skip

    def recur(self, output: Tensor, entering: Tensor | None, leaving: Tensor | None) -> None:
        p, tile = self.p, recurrent_tile(self.key_size, self.value_size)
        programs = self.sequences * self.heads * triton.cdiv(self.value_size, tile.width)
        if programs == 0:
            return
        states = [None if x is None else operands.states(x) for x in (entering, leaving)]
        recur[(programs,)](
            self.tokens(p.q), self.tokens(p.k), self.tokens(p.v), self.tokens(p.beta[..., None]), self.log_decay(),
            self.tokens(output), *states, *self.partition, self.heads, p.scale,
            D=padded(self.key_size), W=tile.width, DECAY=self.decay_name, NORMALIZE=p.normalize_qk, **tile.options,
        )  # fmt: skip

    def log_decay(self) -> Tokens | None:
        if self.p.log_decay is None:
            return None
        # One per head is that of a single token.
        of_head = not self.form.has_tokens
        return self.tokens(self.p.log_decay.contiguous()[None, None] if of_head else self.p.log_decay)

    def tokens(self, x: Tensor | None) -> Tokens | None:
        return None if x is None else operands.tokens(x, self.heads)

    def states(self, x: Tensor | None) -> States | None:
        """As the walks hold them: E by rows."""
        return None if x is None else operands.states(x, transposed=True)
