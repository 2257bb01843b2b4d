"""The Triton backend, for NVIDIA and AMD GPUs: how a call is partitioned into programs, and their launches.

Every sequence is partitioned into segments, as few as fill the card. The parts of dweight and dbias are added up in
order afterwards: no atomics, and the same call gives the same bits.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fulmen.ops.causal_conv1d.problem import Convolution, Gradients, Step
from fulmen.ops.causal_conv1d.triton.kernels import (
    Strided,
    convolve,
    differentiate,
    differentiate_initial,
    last_inputs,
    roll,
)
from fulmen.ops.causal_conv1d.triton.tiles import ONE_TOKEN, ConvolutionTile, backward_tile, forward_tile
from fulmen.runtime.architectures import architecture_of
from fulmen.triton_common.launching import on_its_device
from fulmen.triton_common.operands import UNIT, Partition
from fulmen.triton_common.tiles import launch_options

PROGRAMS = 8  # for each multiprocessor, to hide the latency of memory


@on_its_device
def forward(p: Convolution, output: Tensor, state: Tensor | None) -> None:
    tile, sequences = forward_tile(p.x), p.state_shape[0]
    partition, tiles = _partition(p, tile)
    if sequences == 0:
        return
    if p.x.shape[1] > 0:
        convolve[(tiles * sequences * partition.segments,)](
            *_call(p), _tokens(output), *partition, sequences, p.x.shape[2],
            T=tile.tokens, W=tile.channels, K=p.weight.shape[1], ACTIVATION=p.activation, **tile.options,
        )  # fmt: skip
    if state is not None and state.shape[2] > 0:
        last_inputs[(tiles * sequences,)](
            _tokens(p.x), _state(p.initial_state), _state(state), *_whole(partition), p.x.shape[2],
            S=triton.next_power_of_2(state.shape[2]), W=tile.channels, **launch_options(warps=4),
        )  # fmt: skip


@on_its_device
def backward(p: Convolution, grad_output: Tensor | None, grad_state: Tensor | None, grads: Gradients) -> None:
    tile, sequences = backward_tile(p.x, p.weight.shape[1]), p.state_shape[0]
    partition, tiles = _partition(p, tile)
    channels, taps = p.weight.shape
    if sequences == 0:
        return
    grad, of_state = _tokens(grad_output), _state(grad_state)
    summed = grads.weight is not None or grads.bias is not None
    if p.x.shape[1] > 0:
        sums = p.x.new_empty(sequences * partition.segments, taps + 1, channels, dtype=torch.float32)
        differentiate[(tiles * sequences * partition.segments,)](
            *_call(p), grad, of_state, _tokens(grads.x), _tokens(sums) if summed else None,
            *partition, sequences, channels,
            T=tile.tokens, W=tile.channels, K=taps, KP=triton.next_power_of_2(taps + 1), ACTIVATION=p.activation,
            **tile.options,
        )  # fmt: skip
        total = sums.sum(0)
        if grads.weight is not None:
            grads.weight.copy_(total[:taps].T)
        if grads.bias is not None:
            grads.bias.copy_(total[taps])
    if grads.initial_state is not None and grads.initial_state.shape[2] > 0:
        differentiate_initial[(tiles * sequences,)](
            *_call(p), grad, of_state, _state(grads.initial_state), *_whole(partition), channels,
            S=triton.next_power_of_2(grads.initial_state.shape[2] + taps - 1), W=tile.channels, K=taps,
            ACTIVATION=p.activation, **launch_options(warps=4),
        )  # fmt: skip


@on_its_device
def step(p: Step, output: Tensor) -> None:
    batch, channels = p.x.shape
    if batch == 0:
        return
    tile = ONE_TOKEN
    roll[(batch * triton.cdiv(channels, tile.channels),)](
        _tokens(p.x[:, None]), _state(p.state), _weight(p.weight), _bias(p.bias), _tokens(output[:, None]), channels,
        W=tile.channels, K=p.weight.shape[1], ACTIVATION=p.activation, **tile.options,
    )  # fmt: skip


def _partition(p: Convolution, tile: ConvolutionTile) -> tuple[Partition, int]:
    """How sequences are partitioned into segments, and channels into how many tiles."""
    length, tiles = p.x.shape[1], triton.cdiv(p.x.shape[2], tile.channels)
    wanted = triton.cdiv(PROGRAMS * architecture_of(p.x.device).multiprocessors, max(1, tiles * p.state_shape[0]))
    segments = max(1, min(wanted, length // UNIT.value))
    tokens = triton.cdiv(triton.cdiv(length, segments), UNIT.value) * UNIT.value
    return Partition(p.cu_seqlens, length, segments, tokens), tiles


def _whole(partition: Partition) -> Partition:
    """The same with one segment for each sequence."""
    return partition._replace(segments=1, tokens=partition.length)


def _call(p: Convolution) -> tuple[Strided | None, ...]:
    return _tokens(p.x), _weight(p.weight), _bias(p.bias), _state(p.initial_state)


def _tokens(x: Tensor | None) -> Strided | None:
    """``[B, N, C]``."""
    if x is None:
        return None
    batch, token, channel = x.stride()
    return Strided(x, batch, token, channel, x.shape[1])


def _state(x: Tensor | None) -> Strided | None:
    """``[B, C, W]``."""
    return _tokens(None if x is None else x.transpose(1, 2))


def _weight(x: Tensor) -> Strided:
    """``[C, K]``."""
    return Strided(x, 0, x.stride(1), x.stride(0), x.shape[1])


def _bias(x: Tensor | None) -> Strided | None:
    """``[C]``."""
    return None if x is None else Strided(x, 0, 0, x.stride(0), 1)
