"""The Triton backend, for NVIDIA and AMD GPUs (the published ``Flao Tri``): two kernels, each used several times.

    sum_outer        Σ_t x_t y_tᵀ        kv (k, v) and dkv (q, do ⊙ g)
    multiply_rows    x·A                 qkv and o, or dg (q, kv), dq (do ⊙ g, kvᵀ), dk (v, dkvᵀ), dv (k, dkv)

The tokens of a sum are cut into segments, as few as fill the card, whose sums are added up in order: no atomics, and
the same call gives the same bits. Products are as exact as in linear attention
(:mod:`fulmen.linear_attention.triton.products`): kv and dkv are float32 and enter a product as two bfloat16 terms.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulmen.gpu.architectures import architecture_of
from fulmen.gpu.launching import on_its_device
from fulmen.gpu.tiles import gate_rows_tile, gate_sum_tile
from fulmen.linear_attention.triton.operands import (
    load_rows,
    load_state,
    readable,
    states,
    store_rows,
    store_state,
    tokens,
)
from fulmen.linear_attention.triton.products import product
from fulmen.output_gate.problem import Gated, Kept

SHORTEST_SEGMENT = 1024


@on_its_device
def forward(p: Gated, output: Tensor, kept: Kept) -> None:
    p = Gated(*map(readable, p))
    kv = _sum_outer(p.k, p.v, into=kept.kv)
    _multiply_rows(p.q, kv, output, factor=p.g, ungated=kept.qkv)


@on_its_device
def backward(p: Gated, kept: Kept, grad: Tensor, grads: Gated) -> None:
    p, grad = Gated(*map(readable, p)), readable(grad)
    kv = _sum_outer(p.k, p.v) if kept.kv is None else kept.kv
    if kept.qkv is None:
        _multiply_rows(p.q, kv, grads.g, factor=grad)
    else:
        torch.mul(grad, kept.qkv, out=grads.g)
    _multiply_rows(grad, kv.mT, grads.q, gate=p.g)
    dkv = _sum_outer(p.q, grad, gate=p.g)
    _multiply_rows(p.v, dkv.mT, grads.k)
    _multiply_rows(p.k, dkv, grads.v)


def _sum_outer(x: Tensor, y: Tensor, *, gate: Tensor | None = None, into: Tensor | None = None) -> Tensor:
    """Σ_t x_t (y_t ⊙ gate_t)ᵀ, ``[B, H, D, E]`` float32, for x ``[B, N, H, D]`` and y ``[B, N, H, E]``."""
    batch, length, heads, rows = x.shape
    columns = y.shape[3]
    sums = x.new_empty(batch, heads, rows, columns, dtype=torch.float32) if into is None else into
    tile = gate_sum_tile(rows, columns, x.dtype, gate is not None)
    programs = batch * heads * triton.cdiv(rows, tile.depth) * triton.cdiv(columns, tile.width)
    if programs == 0:
        return sums
    architecture = architecture_of(x.device)
    segments = min(triton.cdiv(architecture.multiprocessors, programs), max(1, length // SHORTEST_SEGMENT))
    if torch.are_deterministic_algorithms_enabled():
        segments = 1  # bits then do not depend on the batch
    parts = sums[:, :, None] if segments == 1 else sums.new_empty(batch, heads, segments, rows, columns)
    sum_outer[(programs * segments,)](
        tokens(x, heads), tokens(y, heads), None if gate is None else tokens(gate, heads), states(parts),
        length, triton.cdiv(length, segments), segments, heads,
        C=tile.chunk, R=tile.depth, W=tile.width, PRECISION=_precision(x),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if segments > 1:
        torch.sum(parts, 2, out=sums)
    return sums


def _multiply_rows(
    x: Tensor,
    matrix: Tensor,
    result: Tensor,
    *,
    gate: Tensor | None = None,
    factor: Tensor | None = None,
    ungated: Tensor | None = None,
) -> None:
    """``result = factor ⊙ ((x ⊙ gate)·matrix)``, and the same without the factor to ``ungated``."""
    batch, length, heads, depth = x.shape
    columns = result.shape[3]
    tile = gate_rows_tile(depth, columns, x.dtype)
    programs = batch * heads * triton.cdiv(length, tile.chunk) * triton.cdiv(columns, tile.width)
    if programs == 0:
        return
    multiply_rows[(programs,)](
        tokens(x, heads), *(None if t is None else tokens(t, heads) for t in (gate, factor, ungated)),
        states(matrix), tokens(result, heads), length, heads,
        C=tile.chunk, R=tile.depth, W=tile.width, PRECISION=_precision(x),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _precision(x: Tensor) -> str:
    return architecture_of(x.device).single if x.dtype == torch.float32 else "two terms"


@triton.jit
def gated_rows(x, gate, sample, t, head, rows, valid, columns):
    values = load_rows(x, sample, t, head, rows, valid, columns)
    if gate is not None:
        values = values.to(tl.float32) * load_rows(gate, sample, t, head, rows, valid, columns).to(tl.float32)
    return values


@triton.jit(do_not_specialize=("length", "segment_length", "segments"))  # one compilation for all lengths
def sum_outer(
    x, y, gate, sums, length, segment_length, segments, heads,
    C: tl.constexpr, R: tl.constexpr, W: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of Σ_t x_t (y_t ⊙ gate_t)ᵀ over one segment of one head."""
    row_tiles, column_tiles = tl.cdiv(x.size, R), tl.cdiv(y.size, W)
    program = tl.program_id(0)
    row_tile, column_tile = program // column_tiles % row_tiles, program % column_tiles
    program //= row_tiles * column_tiles
    segment, head, sample = program % segments, program // segments % heads, program // (segments * heads)
    x_columns, y_columns = row_tile * R + tl.arange(0, R), column_tile * W + tl.arange(0, W)
    rows = tl.arange(0, C)
    first = segment.to(tl.int64) * segment_length
    last = tl.minimum(first + segment_length, length)
    total = tl.zeros([R, W], tl.float32)
    for step in range(tl.cdiv(last - first, C).to(tl.int32)):
        t = first + step * C
        left = load_rows(x, sample.to(tl.int64), t, head, rows, last - t, x_columns)
        right = gated_rows(y, gate, sample.to(tl.int64), t, head, rows, last - t, y_columns)
        total += product(tl.trans(left), right, PRECISION)
    store_state(sums, sample, head, segment, x_columns, y_columns, x.size, y.size, total)


@triton.jit(do_not_specialize=("length",))
def multiply_rows(
    x, gate, factor, ungated, matrix, result, length, heads,
    C: tl.constexpr, R: tl.constexpr, W: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """C tokens and W columns of factor ⊙ ((x ⊙ gate)·matrix)."""
    tiles, chunks = tl.cdiv(result.size, W), tl.cdiv(length, C)
    program = tl.program_id(0)
    tile, chunk = program % tiles, program // tiles % chunks
    head, sample = program // (tiles * chunks) % heads, program // (tiles * chunks * heads)
    rows, columns = tl.arange(0, C), tile * W + tl.arange(0, W)
    t = chunk.to(tl.int64) * C
    place, valid = sample.to(tl.int64), length - t
    total = tl.zeros([C, W], tl.float32)
    for step in range(tl.cdiv(x.size, R)):
        depth = step * R + tl.arange(0, R)
        left = gated_rows(x, gate, place, t, head, rows, valid, depth)
        right = load_state(matrix, sample, head, sample * 0, depth, columns, x.size, result.size)
        total += product(left, right, PRECISION)
    if ungated is not None:
        store_rows(ungated, place, t, head, rows, valid, columns, total)
    if factor is not None:
        total *= load_rows(factor, place, t, head, rows, valid, columns).to(tl.float32)
    store_rows(result, place, t, head, rows, valid, columns, total)
