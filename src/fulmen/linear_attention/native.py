"""The CPU core's linear attention (csrc/): describes a call to it, and nothing else."""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from fulmen import core as c
from fulmen.linear_attention.problem import Attention, Gradients, States, Step
from fulmen.linear_attention.validation import packed_bounds
from fulmen.tensors import dense

_SCHEDULES = {"auto": 0, "recurrent": 1, "loop": 2, "parallel": 3, "recompute": 4}
_NO_DECAY, _PER_HEAD, _PER_TOKEN, _PER_CHANNEL = range(4)

# The structs of csrc/fulmen.h. A problem ends with its workspace; what follows differs from call to call.
_PROBLEM = "16qd" + 5 * c.TENSOR + c.STATE + "2q"
_FORWARD = struct.Struct("=" + _PROBLEM + c.TENSOR + c.STATE)
_BACKWARD = struct.Struct("=" + _PROBLEM + c.TENSOR + c.STATE + 5 * c.TENSOR + c.STATE)
_STATES_FORWARD = struct.Struct("=" + _PROBLEM + "5q")
_STATES_BACKWARD = struct.Struct("=" + _PROBLEM + "9q" + 4 * c.TENSOR + c.STATE)
_STEP = struct.Struct("=11qd" + 5 * c.TENSOR + c.STATE + c.TENSOR)


def forward(p: Attention, output: Tensor, state: Tensor | None) -> None:
    call = _Call(p)
    c.require().with_workspace("attention_forward", _FORWARD, call.words, c.tensor(output) + c.state(state))


def backward(p: Attention, grad_output: Tensor | None, grad_state: Tensor | None, grads: Gradients) -> None:
    call = _Call(p)
    after = call.given(grad_output) + c.state(grad_state) + c.tensor(grads.q) + _gradients(grads)
    c.require().with_workspace("attention_backward", _BACKWARD, call.words, after)


def states_forward(p: States, states: Tensor) -> None:
    call = _Call(p)
    after = (p.chunk_size, states.data_ptr(), *states.stride()[:3])
    c.require().with_workspace("states_forward", _STATES_FORWARD, call.words, after)


def states_backward(p: States, states: Tensor, grad_states: Tensor, grads: Gradients) -> None:
    call = _Call(p)
    states, grad_states = states.contiguous(), grad_states.contiguous()
    after = (p.chunk_size, states.data_ptr(), *states.stride()[:3], grad_states.data_ptr(), *grad_states.stride()[:3])
    c.require().with_workspace("states_backward", _STATES_BACKWARD, call.words, after + _gradients(grads))


def step(p: Step, output: Tensor) -> None:
    q, k, v, state, decay, decay_v, scale = p
    batch, heads, key_dim, value_dim = state.shape
    q, k, v = _readable(q), _readable(k), _readable(v)
    form, form_v = _NO_DECAY, _NO_DECAY
    decay_words = decay_v_words = c.ABSENT
    if decay is not None:
        form = (_PER_HEAD, _PER_TOKEN, _PER_CHANNEL)[decay.ndim - 1]
        decay = _readable(decay, channels=form == _PER_CHANNEL)
        decay_words = _per_head(decay) if form == _PER_HEAD else _token(decay)
    if decay_v is not None:
        form_v, decay_v = _PER_CHANNEL, _readable(decay_v)
        decay_v_words = _token(decay_v)
    c.require()(
        "step",
        _STEP,
        *(c.ABI_VERSION, batch, heads, q.shape[1], k.shape[1], v.shape[1], key_dim, value_dim),
        *(torch.get_num_threads(), form, form_v, scale, *_token(q), *_token(k), *_token(v)),
        *(*decay_words, *decay_v_words, *c.state(state), *_token(output)),
    )


def _token(x: Tensor) -> c.Words:
    """``[B, heads, size]`` or ``[B, heads]``: a tensor without tokens."""
    strides = x.stride()
    return x.data_ptr(), c.DTYPES[x.dtype], strides[0], 0, strides[1]


def _per_head(x: Tensor) -> c.Words:
    """``[H]``."""
    return x.data_ptr(), c.DTYPES[x.dtype], 0, 0, x.stride(0)


def workspace_bytes(p: Attention, backward: bool = False) -> int:
    """The workspace of a call, in bytes; of its tensors only shapes and dtypes matter.

    >>> x = torch.empty(1).expand(1, 32768, 16, 128)      # no memory behind it
    >>> workspace_bytes(Attention(x, x, x, None, None, 1.0, None, None, "auto"))
    """
    call = _Call(p)
    if not backward:
        after = c.tensor(p.q) + c.ABSENT
        return c.require().workspace_bytes("attention_forward", _FORWARD, call.words, after)
    decay = c.ABSENT if p.decay is None else _decay(p.decay)[1]
    after = c.tensor(p.q) + c.ABSENT + 3 * c.tensor(p.q) + decay + c.tensor(p.decay_v) + c.ABSENT
    return c.require().workspace_bytes("attention_backward", _BACKWARD, call.words, after)


class _Call:
    """A call as words up to its workspace; keeps alive the tensors that had to be copied for it."""

    def __init__(self, p: Attention | States) -> None:
        self._kept: list[Tensor] = []
        attention = p if isinstance(p, Attention) else None
        batch, length, key_heads, key_dim = p.k.shape
        heads, value_heads, value_dim = p.heads, p.v.shape[2], p.v.shape[3]
        query_heads = heads if attention is None else attention.q.shape[2]
        sequences = offsets = 0
        if attention is not None and attention.cu_seqlens is not None:
            bounds = torch.tensor(packed_bounds(attention.cu_seqlens, length), dtype=torch.int64)
            self._kept.append(bounds)
            sequences, offsets = bounds.shape[0] - 1, bounds.data_ptr()
        form, decay = _decay(None if p.decay is None else self._keep(p.decay, channels=p.decay.ndim == 4))
        self.words: Any = (
            *(c.ABI_VERSION, batch, length, heads, query_heads, key_heads, value_heads, key_dim, value_dim),
            *(sequences, offsets, _SCHEDULES[p.schedule], torch.are_deterministic_algorithms_enabled()),
            *(torch.get_num_threads(), form, _NO_DECAY if p.decay_v is None else _PER_CHANNEL),
            1.0 if attention is None else attention.scale,
            *(c.ABSENT if attention is None else self.given(attention.q)),
            *(*self.given(p.k), *self.given(p.v), *decay, *self.given(p.decay_v), *c.state(p.initial_state)),
        )

    def given(self, x: Tensor | None) -> c.Words:
        return c.ABSENT if x is None else c.tensor(self._keep(x))

    def _keep(self, x: Tensor, channels: bool = True) -> Tensor:
        x = _readable(x, channels)
        self._kept.append(x)
        return x


def _readable(x: Tensor, channels: bool = True) -> Tensor:
    """An input as the core can read it: no float64 (which only a decay may have), and dense along its channels."""
    x = x.float() if x.dtype == torch.float64 else x
    return dense(x) if channels else x


def _decay(x: Tensor | None) -> tuple[int, c.Words]:
    """The form of a decay ``[H]``, ``[B, N, H]`` or ``[B, N, H, D]``, and its words."""
    if x is None:
        return _NO_DECAY, c.ABSENT
    if x.ndim == 1:
        return _PER_HEAD, _per_head(x)
    return _PER_TOKEN if x.ndim == 3 else _PER_CHANNEL, c.tensor(x)


def _gradients(grads: Gradients) -> c.Words:
    return (
        c.tensor(grads.k)
        + c.tensor(grads.v)
        + _decay(grads.decay)[1]
        + c.tensor(grads.decay_v)
        + c.state(grads.initial_state)
    )
