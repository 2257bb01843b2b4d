"""The two forms of Lightning Attention-2 as Triton kernels; :mod:`~fulmen.lab.baselines.lightning2` has the formulas.

A baseline: it has no tile table and its kernels may spill. Tensors are contiguous, ``[B, H, N, channels]``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulmen.runtime.architectures import architecture_of
from fulmen.triton_common.launching import on_its_device
from fulmen.triton_common.naming import Compiled, named
from fulmen.triton_common.tiles import launch_options, padded

BLOCK = 256  # tokens between two states of the parallel form
ROWS = 64  # tokens at a time, in both forms
WIDTH = 32  # channels of z in one program


@on_its_device
def loop_walk(x: Tensor, y: Tensor, z: Tensor, decay: Tensor, backward: bool) -> Tensor:
    x, y, z, decay = (t.contiguous() for t in (x, y, z, decay))
    batch, heads, _, write = z.shape
    result = torch.empty_like(z)
    grid = (batch * heads, triton.cdiv(write, WIDTH))
    loop_kernel[grid](x, y, z, result, decay, *_sizes(x, z), **_constants(x, z, backward))
    return result


@on_its_device
def parallel_walk(x: Tensor, y: Tensor, z: Tensor, decay: Tensor, backward: bool) -> Tensor:
    x, y, z, decay = (t.contiguous() for t in (x, y, z, decay))
    batch, heads, length, write = z.shape
    result = torch.empty_like(z)
    blocks, tiles = triton.cdiv(length, BLOCK), triton.cdiv(write, WIDTH)
    states = z.new_empty(batch * heads, blocks, x.shape[3], write, dtype=torch.float32)
    constants = _constants(x, z, backward)
    block_states_kernel[batch * heads, blocks, tiles](y, z, states, decay, *_sizes(x, z), BLOCK=BLOCK, **constants)
    reduce_kernel[batch * heads, tiles](states, decay, *_sizes(x, z), BLOCK=BLOCK, **constants)
    grid = (batch * heads, triton.cdiv(length, ROWS), tiles)
    block_kernel[grid](x, y, z, result, states, decay, *_sizes(x, z), BLOCK=BLOCK, **constants)
    return result


def _sizes(x: Tensor, z: Tensor) -> tuple[int, int, int, int]:
    return z.shape[2], z.shape[1], x.shape[3], z.shape[3]


def _constants(x: Tensor, z: Tensor, backward: bool) -> dict[str, object]:
    return {
        "C": ROWS, "R": padded(x.shape[3]), "W": min(WIDTH, padded(z.shape[3])), "BACKWARD": backward,
        "PRECISION": architecture_of(x.device).single, **launch_options(warps=4 if x.shape[3] <= 64 else 8),
    }  # fmt: skip


def direction(kernel: Compiled) -> list[str]:
    return ["backward" if kernel["BACKWARD"] else ""]


@triton.jit
def power(log, exponent):
    """λ^exponent; λ^0 is 1 also where the logarithm is -inf, and no exponent is negative."""
    return tl.exp(tl.where(exponent > 0, log * exponent.to(tl.float32), 0.0))


@triton.jit
def rows_of(x, sequence, length, size, rows, columns):
    """Pointers to ``[rows, columns]`` of one head, and which of them exist."""
    token = sequence.to(tl.int64) * length + rows
    return x + token[:, None] * size + columns[None, :], (rows < length)[:, None] & (columns < size)[None, :]


@triton.jit
def load(x, sequence, length, size, rows, columns):
    pointers, exist = rows_of(x, sequence, length, size, rows, columns)
    return tl.load(pointers, mask=exist, other=0.0)


@triton.jit
def pairs(x, y, z, log, apart, PRECISION: tl.constexpr):
    """What rows get from columns ``apart`` tokens away, none where that is negative."""
    scores = tl.dot(x, tl.trans(y), input_precision=PRECISION) * power(log, apart)
    scores = tl.where(apart >= 0, scores, 0.0)
    return tl.dot(scores.to(z.dtype), z, input_precision=PRECISION)


@triton.jit
def added(y, z, log, distance, PRECISION: tl.constexpr):
    """What tokens add to a state ``distance`` tokens away."""
    weighed = (y * power(log, distance)[:, None]).to(z.dtype)
    return tl.dot(tl.trans(weighed), z, input_precision=PRECISION)


@triton.jit(repr=named("lightning2_chunk_loop", direction))
def loop_kernel(
    x, y, z, result, decay, length, heads, read, write,
    C: tl.constexpr, R: tl.constexpr, W: tl.constexpr, BACKWARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    sequence, writes = tl.program_id(0), tl.program_id(1) * W + tl.arange(0, W)
    reads, inside = tl.arange(0, R), tl.arange(0, C)
    log = tl.load(decay + sequence % heads).to(tl.float32)
    state = tl.zeros([R, W], tl.float32)
    blocks = tl.cdiv(length, C)
    for step in range(0, blocks):
        start = step * C
        apart = inside[:, None] - inside[None, :]
        if BACKWARD:
            start = (blocks - 1 - step) * C
            apart = inside[None, :] - inside[:, None]
        size = tl.minimum(length - start, C)
        rows = start + inside
        x_rows = load(x, sequence, length, read, rows, reads)
        y_rows = load(y, sequence, length, read, rows, reads)
        z_rows = load(z, sequence, length, write, rows, writes)
        to_first, to_last = inside + 1, tl.maximum(size - 1 - inside, 0)
        enter, leave = to_first, to_last
        if BACKWARD:
            enter, leave = to_last, to_first
        values = tl.dot(x_rows, state.to(x_rows.dtype), input_precision=PRECISION) * power(log, enter)[:, None]
        values += pairs(x_rows, y_rows, z_rows, log, apart, PRECISION)
        state = state * power(log, size) + added(y_rows, z_rows, log, leave, PRECISION)
        pointers, exist = rows_of(result, sequence, length, write, rows, writes)
        tl.store(pointers, values.to(z_rows.dtype), mask=exist)


@triton.jit(repr=named("lightning2_block_states", direction))
def block_states_kernel(
    y, z, states, decay, length, heads, read, write,
    BLOCK: tl.constexpr, C: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    BACKWARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What each block alone adds to the state after it."""
    sequence, block, writes = tl.program_id(0), tl.program_id(1), tl.program_id(2) * W + tl.arange(0, W)
    reads, inside = tl.arange(0, R), tl.arange(0, C)
    log = tl.load(decay + sequence % heads).to(tl.float32)
    size = tl.minimum(length - block * BLOCK, BLOCK)
    state = tl.zeros([R, W], tl.float32)
    for start in range(0, BLOCK, C):
        rows = start + inside
        y_rows = load(y, sequence, length, read, block * BLOCK + rows, reads)
        z_rows = load(z, sequence, length, write, block * BLOCK + rows, writes)
        leave = rows + 1 if BACKWARD else tl.maximum(size - 1 - rows, 0)
        state += added(y_rows, z_rows, log, leave, PRECISION)
    pointers, exist = state_at(states, sequence, tl.num_programs(1), block, reads, writes, read, write)
    tl.store(pointers, state, mask=exist)


@triton.jit(repr=named("lightning2_reduce", direction))
def reduce_kernel(
    states, decay, length, heads, read, write,
    BLOCK: tl.constexpr, C: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    BACKWARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Turn what blocks add into the states that enter them, in place."""
    sequence, writes, reads = tl.program_id(0), tl.program_id(1) * W + tl.arange(0, W), tl.arange(0, R)
    log = tl.load(decay + sequence % heads).to(tl.float32)
    blocks = tl.cdiv(length, BLOCK)
    state = tl.zeros([R, W], tl.float32)
    for step in range(0, blocks):
        block = blocks - 1 - step if BACKWARD else step
        size = tl.minimum(length - block * BLOCK, BLOCK)
        pointers, exist = state_at(states, sequence, blocks, block, reads, writes, read, write)
        more = tl.load(pointers, mask=exist, other=0.0)
        tl.store(pointers, state, mask=exist)
        state = state * power(log, size) + more


@triton.jit(repr=named("lightning2_blocks", direction))
def block_kernel(
    x, y, z, result, states, decay, length, heads, read, write,
    BLOCK: tl.constexpr, C: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    BACKWARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """C tokens of a block: what they get from the others of the block, and from the state that enters it."""
    sequence, writes = tl.program_id(0), tl.program_id(2) * W + tl.arange(0, W)
    block, own = tl.program_id(1) * C // BLOCK, tl.program_id(1) * C % BLOCK
    reads, inside = tl.arange(0, R), tl.arange(0, C)
    log = tl.load(decay + sequence % heads).to(tl.float32)
    first, size = block * BLOCK, tl.minimum(length - block * BLOCK, BLOCK)
    rows = own + inside
    x_rows = load(x, sequence, length, read, first + rows, reads)
    pointers, exist = state_at(states, sequence, tl.cdiv(length, BLOCK), block, reads, writes, read, write)
    state = tl.load(pointers, mask=exist, other=0.0).to(x_rows.dtype)
    enter = tl.maximum(size - 1 - rows, 0) if BACKWARD else rows + 1
    values = tl.dot(x_rows, state, input_precision=PRECISION) * power(log, enter)[:, None]
    for start in range(own if BACKWARD else 0, size if BACKWARD else own + C, C):
        columns = start + inside
        y_rows = load(y, sequence, length, read, first + columns, reads)
        z_rows = load(z, sequence, length, write, first + columns, writes)
        apart = columns[None, :] - rows[:, None] if BACKWARD else rows[:, None] - columns[None, :]
        values += pairs(x_rows, y_rows, z_rows, log, apart, PRECISION)
    pointers, exist = rows_of(result, sequence, length, write, first + rows, writes)
    tl.store(pointers, values.to(x_rows.dtype), mask=exist)


@triton.jit
def state_at(states, sequence, blocks, block, reads, writes, read, write):
    state = states + (sequence.to(tl.int64) * blocks + block) * read * write
    exist = (reads < read)[:, None] & (writes < write)[None, :]
    return state + reads[:, None] * write + writes[None, :], exist
