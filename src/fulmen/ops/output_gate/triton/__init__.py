"""The Triton backend, for NVIDIA and AMD GPUs (the published ``Flao Tri``): two kernels, each used several times.

    sum_outer        Σ_t x_t y_tᵀ        kv (k, v) and dkv (q, do ⊙ gate)
    multiply_rows    x·A                 qkv and o, or dgate (q, kv), dq (do ⊙ gate, kvᵀ), dk (v, dkvᵀ), dv (k, dkv)

The tokens of a sum are partitioned into segments, as few as fill the card, whose sums are added up in order: no
atomics, and the same call gives the same bits. Products are as exact as in linear attention
(:mod:`fulmen.triton_common.products`): kv and dkv are float32, and they and do ⊙ gate enter a product rounded to
bfloat16 beside inputs that are, as two bfloat16 terms beside float16.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fulmen.ops.output_gate.problem import Gated, Kept
from fulmen.ops.output_gate.triton.kernels import multiply_rows, sum_outer
from fulmen.ops.output_gate.triton.tiles import rows_tile, sum_tile
from fulmen.runtime.architectures import architecture_of
from fulmen.triton_common.launching import on_its_device
from fulmen.triton_common.operands import readable, states, tokens

SHORTEST_SEGMENT = 1024
CHUNKS = 8  # of tokens that a program multiplies with one matrix


@on_its_device
def forward(p: Gated, output: Tensor, kept: Kept) -> None:
    p = Gated(*map(readable, p))
    kv = _sum_outer("kv", p.k, p.v, into=kept.kv)
    _multiply_rows("output", p.q, kv, output, factor=p.gate, ungated=kept.qkv)


@on_its_device
def backward(p: Gated, kept: Kept, grad: Tensor, grads: Gated) -> None:
    p, grad = Gated(*map(readable, p)), readable(grad)
    kv = _sum_outer("kv", p.k, p.v) if kept.kv is None else kept.kv
    if kept.qkv is None:
        _multiply_rows("dgate", p.q, kv, grads.gate, factor=grad)
    else:
        torch.mul(grad, kept.qkv, out=grads.gate)
    _multiply_rows("dq", grad, kv.mT, grads.q, gate=p.gate)
    dkv = _sum_outer("dkv", p.q, grad, gate=p.gate)
    _multiply_rows("dk", p.v, dkv.mT, grads.k)
    _multiply_rows("dv", p.k, dkv, grads.v)


def _sum_outer(what: str, x: Tensor, y: Tensor, *, gate: Tensor | None = None, into: Tensor | None = None) -> Tensor:
    """Σ_t x_t (y_t ⊙ gate_t)ᵀ, ``[B, H, D, E]`` float32, for x ``[B, N, H, D]`` and y ``[B, N, H, E]``."""
    batch, length, heads, rows = x.shape
    columns = y.shape[3]
    sums = x.new_empty(batch, heads, rows, columns, dtype=torch.float32) if into is None else into
    architecture = architecture_of(x.device)
    tile = sum_tile(rows, columns, x.dtype, architecture)
    programs = batch * heads * triton.cdiv(rows, tile.depth) * triton.cdiv(columns, tile.width)
    if programs == 0:
        return sums
    segments = min(triton.cdiv(architecture.multiprocessors, programs), max(1, length // SHORTEST_SEGMENT))
    if torch.are_deterministic_algorithms_enabled():
        segments = 1  # bits then do not depend on the batch
    parts = sums[:, :, None] if segments == 1 else sums.new_empty(batch, heads, segments, rows, columns)
    sum_outer[(programs * segments,)](
        tokens(x, heads), tokens(y, heads), None if gate is None else tokens(gate, heads), states(parts),
        length, triton.cdiv(length, segments), segments, heads,
        C=tile.chunk, R=tile.depth, W=tile.width, PRECISION=_precision(x), ROUNDS=x.dtype == torch.bfloat16,
        RESULT=what, **tile.options,
    )  # fmt: skip
    if segments > 1:
        torch.sum(parts, 2, out=sums)
    return sums


def _multiply_rows(
    what: str,
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
    tile = rows_tile(depth, columns, x.dtype, architecture_of(x.device))
    programs = batch * heads * triton.cdiv(length, CHUNKS * tile.chunk) * triton.cdiv(columns, tile.width)
    if programs == 0:
        return
    multiply_rows[(programs,)](
        tokens(x, heads), *(None if t is None else tokens(t, heads) for t in (gate, factor, ungated)),
        states(matrix), tokens(result, heads), length, heads,
        C=tile.chunk, S=CHUNKS, R=tile.depth, W=tile.width, WHOLE=depth <= tile.depth,
        PRECISION=_precision(x), ROUNDS=x.dtype == torch.bfloat16, RESULT=what, **tile.options,
    )  # fmt: skip


def _precision(x: Tensor) -> str:
    return architecture_of(x.device).single if x.dtype == torch.float32 else "two terms"
