"""The kernels. A program has a tile of channels and walks a segment of one sequence, chunk by chunk; ``t`` is the first
token of a chunk, ``rows`` its tokens ``[T]``, counted along N, and ``columns`` the channels ``[W]``, all int64."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fulmen.triton_common.naming import Compiled, named
from fulmen.triton_common.operands import PARTITION_NUMBERS, Partition, place


class Strided(NamedTuple):
    """A tensor ``[B, tokens, C]``; a state is one too, with W tokens, and a weight with K."""

    pointer: Any
    batch: int  # strides
    token: int
    channel: int
    tokens: int


def words(kernel: Compiled) -> list[str]:
    return [kernel["ACTIVATION"] or "", "state" if kernel.has("initial") else ""]


@triton.jit
def at(x, batch, rows, columns):
    return x.pointer + batch * x.batch + (rows * x.token)[:, None] + (columns * x.channel)[None, :]


@triton.jit
def load_tokens(x, batch, rows, exist, columns, channels):
    """``[T, W]`` in float32; zeros for the rows that do not ``exist``."""
    mask = exist[:, None] & (columns < channels)[None, :]
    return tl.load(at(x, batch, rows, columns), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_tokens(x, batch, rows, exist, columns, channels, values):
    mask = exist[:, None] & (columns < channels)[None, :]
    tl.store(at(x, batch, rows, columns), values.to(x.pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_inputs(x, initial, batch, sequence, start, stop, t, columns, channels, T: tl.constexpr):
    """``[T, W]`` from t on. Those before ``start`` are the initial state's, or zeros."""
    rows = t + tl.arange(0, T)
    u = load_tokens(x, batch, rows, (rows >= start) & (rows < stop), columns, channels)
    if initial is not None:
        before = rows - start + initial.tokens
        exist = (rows < start) & (before >= 0)
        u += load_tokens(initial, sequence.to(tl.int64), before, exist, columns, channels)
    return u


@triton.jit
def load_tap(weight, j, columns, channels):
    """Weight j of each channel."""
    pointers = weight.pointer + j * weight.token + columns * weight.channel
    return tl.load(pointers, mask=columns < channels, other=0.0).to(tl.float32)


@triton.jit
def before_activation(
    x, initial, weight, bias, batch, sequence, start, stop, t, columns, channels, T: tl.constexpr, W: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    z = tl.zeros([T, W], tl.float32)
    if bias is not None:
        z += load_tap(bias, 0, columns, channels)[None, :]
    for j in tl.static_range(K):
        u = load_inputs(x, initial, batch, sequence, start, stop, t - (K - 1) + j, columns, channels, T)
        z += load_tap(weight, j, columns, channels)[None, :] * u
    return z


@triton.jit
def sigmoid(z):
    e = tl.exp(-tl.abs(z))
    return tl.where(z < 0, e, 1.0) / (1.0 + e)


@triton.jit
def program_place(partition, channels, W: tl.constexpr):
    """(columns, segment, sequence, and what :func:`place` gives) of this program."""
    tiles = tl.cdiv(channels, W)
    program = tl.program_id(0)
    columns = (program % tiles).to(tl.int64) * W + tl.arange(0, W)
    program //= tiles
    segment, sequence = program % partition.segments, program // partition.segments
    batch, start, first, last = place(partition, sequence, segment)
    stop = start + partition.length
    if partition.cu_seqlens is not None:
        stop = tl.load(partition.cu_seqlens + sequence + 1).to(tl.int64)
    return columns, segment, sequence, batch, start, stop, first, last


@triton.jit
def clear_rest(
    result, partition, sequences, segment, sequence, stop, columns, channels, T: tl.constexpr, W: tl.constexpr
):
    """Zeros for the tokens that no packed sequence has. Mostly there are none."""
    if partition.cu_seqlens is not None:  # noqa: SIM102  (decided when it is compiled)
        if (sequence == sequences - 1) & (segment == partition.segments - 1):
            for step in range(tl.cdiv(partition.length - stop, T).to(tl.int32)):
                rows = stop + step * T + tl.arange(0, T)
                zeros = tl.zeros([T, W], tl.float32)
                store_tokens(result, stop * 0, rows, rows < partition.length, columns, channels, zeros)


@triton.jit(
    repr=named("causal_conv1d_forward", words),
    do_not_specialize=("sequences",),
    do_not_specialize_on_alignment=PARTITION_NUMBERS,
)
def convolve(
    x, weight, bias, initial, output, cu_seqlens, length, segments, segment_tokens, sequences, channels,
    T: tl.constexpr, W: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    partition = Partition(cu_seqlens, length, segments, segment_tokens)
    columns, segment, sequence, batch, start, stop, first, last = program_place(partition, channels, W)
    steps = tl.cdiv(last - first, T).to(tl.int32)
    begun = steps * 0
    if initial is not None:  # a loop of its own for the chunks that it can reach
        begun = tl.minimum(steps, (K + T - 2) // T)
        for step in range(begun):
            convolve_chunk(
                x, weight, bias, initial, output, batch, sequence, start, stop, first + step * T, last, columns,
                channels, T, W, K, ACTIVATION,
            )  # fmt: skip
    for step in range(begun, steps):
        convolve_chunk(
            x, weight, bias, None, output, batch, sequence, start, stop, first + step * T, last, columns, channels,
            T, W, K, ACTIVATION,
        )  # fmt: skip
    clear_rest(output, partition, sequences, segment, sequence, stop, columns, channels, T, W)


@triton.jit
def convolve_chunk(
    x, weight, bias, initial, output, batch, sequence, start, stop, t, last, columns, channels,
    T: tl.constexpr, W: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    z = before_activation(x, initial, weight, bias, batch, sequence, start, stop, t, columns, channels, T, W, K)
    if ACTIVATION == "silu":
        z *= sigmoid(z)
    rows = t + tl.arange(0, T)
    store_tokens(output, batch, rows, rows < last, columns, channels, z)


@triton.jit(
    repr=named("causal_conv1d_state", lambda kernel: ["state" if kernel.has("initial") else ""]),
    do_not_specialize_on_alignment=PARTITION_NUMBERS,
)
def last_inputs(
    x, initial, state, cu_seqlens, length, segments, segment_tokens, channels, S: tl.constexpr, W: tl.constexpr
):
    """The final state of one sequence; S is at least what it holds."""
    partition = Partition(cu_seqlens, length, segments, segment_tokens)
    columns, _, sequence, batch, start, stop, _, _ = program_place(partition, channels, W)
    places = tl.arange(0, S).to(tl.int64)
    u = load_inputs(x, initial, batch, sequence, start, stop, stop - state.tokens, columns, channels, S)
    store_tokens(state, sequence.to(tl.int64), places, places < state.tokens, columns, channels, u)


@triton.jit
def gradient_before_activation(
    x, initial, weight, bias, grad, batch, sequence, start, stop, t, columns, channels, T: tl.constexpr,
    W: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """dz ``[T, W]`` of tokens; zeros where the sequence has none."""
    rows = t + tl.arange(0, T)
    dz = load_tokens(grad, batch, rows, (rows >= start) & (rows < stop), columns, channels)
    if ACTIVATION == "silu":
        z = before_activation(
            x, initial, weight, bias, batch, sequence, start, stop, t, columns, channels, T, W, K
        )  # fmt: skip
        s = sigmoid(z)
        dz *= s * (1.0 + z * (1.0 - s))
    return dz


@triton.jit
def gradient_of_inputs(
    dz, weight, grad_state, sequence, stop, t, columns, channels, T: tl.constexpr, W: tl.constexpr, K: tl.constexpr
):
    """du ``[T, W]`` of inputs, from dz of the same rows: right for all but the last K - 1. Rows before the sequence are
    the initial state's."""
    du, rows = tl.zeros([T, W], tl.float32), tl.arange(0, T)
    for j in tl.static_range(K):
        later = tl.broadcast_to(tl.minimum(rows + (K - 1 - j), T - 1)[:, None], [T, W])
        du += load_tap(weight, j, columns, channels)[None, :] * tl.gather(dz, later, 0)
    if grad_state is not None:  # noqa: SIM102  (decided when it is compiled)
        if t + T > stop - grad_state.tokens:
            places = t + rows - (stop - grad_state.tokens)
            exist = (places >= 0) & (places < grad_state.tokens)
            du += load_tokens(grad_state, sequence.to(tl.int64), places, exist, columns, channels)
    return du


@triton.jit(
    repr=named("causal_conv1d_backward", words),
    do_not_specialize=("sequences",),
    do_not_specialize_on_alignment=PARTITION_NUMBERS,
)
def differentiate(
    x, weight, bias, initial, grad, grad_state, dx, sums, cu_seqlens, length, segments, segment_tokens, sequences,
    channels, T: tl.constexpr, W: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """dx, and of each segment its part of dweight and, after that, of dbias; KP is at least K + 1. A chunk has K - 1
    tokens of the next one, whose dz it needs."""
    partition = Partition(cu_seqlens, length, segments, segment_tokens)
    columns, segment, sequence, batch, start, stop, first, last = program_place(partition, channels, W)
    total, taps = tl.zeros([KP, W], tl.float32), tl.arange(0, KP)
    OWN: tl.constexpr = T - (K - 1)
    steps = tl.cdiv(last - first, OWN).to(tl.int32)
    begun = steps * 0
    if initial is not None:
        begun = tl.minimum(steps, (K + OWN - 2) // OWN)
        for step in range(begun):
            total = differentiate_chunk(
                x, weight, bias, initial, grad, grad_state, dx, sums, total, batch, sequence, start, stop,
                first + step * OWN, last, columns, channels, T, W, K, KP, ACTIVATION,
            )  # fmt: skip
    for step in range(begun, steps):
        total = differentiate_chunk(
            x, weight, bias, None, grad, grad_state, dx, sums, total, batch, sequence, start, stop,
            first + step * OWN, last, columns, channels, T, W, K, KP, ACTIVATION,
        )  # fmt: skip
    if sums is not None:
        part = (sequence * segments + segment).to(tl.int64)
        store_tokens(sums, part, taps.to(tl.int64), taps <= K, columns, channels, total)
    if dx is not None:
        clear_rest(dx, partition, sequences, segment, sequence, stop, columns, channels, T, W)


@triton.jit
def differentiate_chunk(
    x, weight, bias, initial, grad, grad_state, dx, sums, total, batch, sequence, start, stop, t, last, columns,
    channels, T: tl.constexpr, W: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """dx of all tokens but the last K - 1, and ``total`` with what these add to dweight and dbias."""
    rows, taps = t + tl.arange(0, T), tl.arange(0, KP)
    own = (rows < last) & (rows < t + T - (K - 1))
    dz = tl.zeros([T, W], tl.float32)
    if grad is not None:
        dz = gradient_before_activation(
            x, initial, weight, bias, grad, batch, sequence, start, stop, t, columns, channels, T, W, K, ACTIVATION
        )  # fmt: skip
    if dx is not None:
        du = gradient_of_inputs(dz, weight, grad_state, sequence, stop, t, columns, channels, T, W, K)
        store_tokens(dx, batch, rows, own, columns, channels, du)
    if sums is not None:
        dz = tl.where(own[:, None], dz, 0.0)
        for j in tl.static_range(K):
            u = load_inputs(x, initial, batch, sequence, start, stop, t - (K - 1) + j, columns, channels, T)
            total += tl.where((taps == j)[:, None], tl.sum(dz * u, 0)[None, :], 0.0)
        total += tl.where((taps == K)[:, None], tl.sum(dz, 0)[None, :], 0.0)
    return total


@triton.jit(repr=named("causal_conv1d_backward_state", words), do_not_specialize_on_alignment=PARTITION_NUMBERS)
def differentiate_initial(
    x, weight, bias, initial, grad, grad_state, dinitial, cu_seqlens, length, segments, segment_tokens, channels,
    S: tl.constexpr, W: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """The gradient of one sequence's initial state; S is at least what it holds and the K - 1 tokens after it."""
    partition = Partition(cu_seqlens, length, segments, segment_tokens)
    columns, _, sequence, batch, start, stop, _, _ = program_place(partition, channels, W)
    places, t = tl.arange(0, S).to(tl.int64), start - dinitial.tokens
    dz = tl.zeros([S, W], tl.float32)
    if grad is not None:
        dz = gradient_before_activation(
            x, initial, weight, bias, grad, batch, sequence, start, stop, t, columns, channels, S, W, K, ACTIVATION
        )  # fmt: skip
    du = gradient_of_inputs(dz, weight, grad_state, sequence, stop, t, columns, channels, S, W, K)
    store_tokens(dinitial, sequence.to(tl.int64), places, places < dinitial.tokens, columns, channels, du)


@triton.jit(repr=named("causal_conv1d_step", lambda kernel: [kernel["ACTIVATION"] or ""]))
def roll(x, state, weight, bias, output, channels, W: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr):
    """One token: its output, and the state rolled in place."""
    tiles = tl.cdiv(channels, W)
    program = tl.program_id(0)
    columns, batch = (program % tiles).to(tl.int64) * W + tl.arange(0, W), (program // tiles).to(tl.int64)
    row, exists = tl.zeros([1], tl.int64), tl.full([1], True, tl.int1)
    z = tl.zeros([1, W], tl.float32)
    if bias is not None:
        z += load_tap(bias, 0, columns, channels)[None, :]
    token = load_tokens(x, batch, row, exists, columns, channels)
    for j in tl.static_range(K - 1):
        u = load_tokens(state, batch, row + (state.tokens - (K - 1) + j), exists, columns, channels)
        z += load_tap(weight, j, columns, channels)[None, :] * u
    z += load_tap(weight, K - 1, columns, channels)[None, :] * token
    if ACTIVATION == "silu":
        z *= sigmoid(z)
    store_tokens(output, batch, row, exists, columns, channels, z)
    for i in range(state.tokens - 1):
        u = load_tokens(state, batch, row + (i + 1), exists, columns, channels)
        store_tokens(state, batch, row + i, exists, columns, channels, u)
    store_tokens(state, batch, row + (state.tokens - 1), (row + state.tokens) > 0, columns, channels, token)
