"""The CPU core's linear attention (csrc/): describes a call to it, and nothing else."""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from fulmen.ops.chunks.decay_form import DecayForm
from fulmen.ops.chunks.sequences import packed_bounds
from fulmen.ops.linear_attention.problem import Attention, Gradients, States, Step
from fulmen.runtime import core as c
from fulmen.runtime.tensors import dense

_SCHEDULES = {"auto": 0, "recurrent": 1, "loop": 2, "parallel": 3, "recompute": 4}

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
    # The core's states are float32.
    state = p.state if p.state.dtype == torch.float32 else p.state.float()
    batch, heads, key_size, value_size = state.shape
    q, k, v = _readable(p.q), _readable(p.k), _readable(p.v)
    form, form_v = p.form, DecayForm.of(p.log_decay_v, step=True)
    decay_words = decay_v_words = c.ABSENT
    if p.log_decay is not None:
        log_decay = _readable(p.log_decay, form.by_channel)
        decay_words = _token(log_decay) if form.has_tokens else _per_head(log_decay)
    if p.log_decay_v is not None:
        log_decay_v = _readable(p.log_decay_v)
        decay_v_words = _token(log_decay_v)
    c.require()(
        "step",
        _STEP,
        *(c.ABI_VERSION, batch, heads, q.shape[1], k.shape[1], v.shape[1], key_size, value_size),
        *(torch.get_num_threads(), form.value, form_v.value, p.scale, *_token(q), *_token(k), *_token(v)),
        *(*decay_words, *decay_v_words, *c.state(state), *_token(output)),
    )
    if state is not p.state:
        p.state.copy_(state)


def _token(x: Tensor) -> c.Words:
    """``[B, heads, size]`` or ``[B, heads]``: a tensor without tokens."""
    strides = x.stride()
    return x.data_ptr(), c.DTYPES[x.dtype], strides[0], 0, strides[1]


def _per_head(x: Tensor) -> c.Words:
    """``[H]``."""
    return x.data_ptr(), c.DTYPES[x.dtype], 0, 0, x.stride(0)


def workspace_bytes(p: Attention, backward: bool = False) -> int:
    """The workspace of a call, in bytes; of its tensors only shapes and dtypes matter.

    >>> x = torch.empty(1).expand(1, 32768, 16, 128)      # one number
    >>> workspace_bytes(Attention(x, x, x, None, None, 1.0, None, None, "auto"))
    """
    call = _Call(p)
    if not backward:
        after = c.tensor(p.q) + c.ABSENT
        return c.require().workspace_bytes("attention_forward", _FORWARD, call.words, after)
    decays = _decay(p.log_decay) + c.tensor(p.log_decay_v)
    after = c.tensor(p.q) + c.ABSENT + 3 * c.tensor(p.q) + decays + c.ABSENT
    return c.require().workspace_bytes("attention_backward", _BACKWARD, call.words, after)


class _Call:
    """A call as words up to its workspace; keeps alive the tensors that had to be copied for it."""

    def __init__(self, p: Attention | States) -> None:
        self._kept: list[Tensor] = []
        attention = p if isinstance(p, Attention) else None
        batch, length, key_heads, key_size = p.k.shape
        heads, value_heads, value_size = p.heads, p.v.shape[2], p.v.shape[3]
        query_heads = heads if attention is None else attention.q.shape[2]
        sequences = offsets = 0
        if attention is not None and attention.cu_seqlens is not None:
            bounds = torch.tensor(packed_bounds(attention.cu_seqlens, length), dtype=torch.int64)
            self._kept.append(bounds)
            sequences, offsets = bounds.shape[0] - 1, bounds.data_ptr()
        form, form_v = p.decays
        decay = _decay(None if p.log_decay is None else self._keep(p.log_decay, form.by_channel))
        self.words: Any = (
            *(c.ABI_VERSION, batch, length, heads, query_heads, key_heads, value_heads, key_size, value_size),
            *(sequences, offsets, _SCHEDULES[p.schedule], torch.are_deterministic_algorithms_enabled()),
            *(torch.get_num_threads(), form.value, form_v.value),
            1.0 if attention is None else attention.scale,
            *(c.ABSENT if attention is None else self.given(attention.q)),
            *(*self.given(p.k), *self.given(p.v), *decay, *self.given(p.log_decay_v), *c.state(p.initial_state)),
        )

    def given(self, x: Tensor | None) -> c.Words:
        return c.ABSENT if x is None else c.tensor(self._keep(x))

    def _keep(self, x: Tensor, channels: bool = True) -> Tensor:
        x = _readable(x, channels)
        self._kept.append(x)
        return x


def _readable(x: Tensor, channels: bool = True) -> Tensor:
    """An input as the core can read it: no float64 (which only a log-decay may have), and dense along its channels."""
    x = x.float() if x.dtype == torch.float64 else x
    return dense(x) if channels else x


def _decay(x: Tensor | None) -> c.Words:
    """A log-decay of any form, or its gradient."""
    return c.tensor(x) if x is None or DecayForm.of(x).has_tokens else _per_head(x)


def _gradients(grads: Gradients) -> c.Words:
    return (
        c.tensor(grads.k)
        + c.tensor(grads.v)
        + _decay(grads.log_decay)
        + c.tensor(grads.log_decay_v)
        + c.state(grads.initial_state)
    )
