"""The CPU core's linear attention (csrc/): describes a call to it, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.ops.chunks.decay_form import DecayForm
from fulmen.ops.chunks.sequences import packed_bounds
from fulmen.ops.linear_attention.problem import Attention, Gradients, States, Step
from fulmen.runtime import core as c
from fulmen.runtime.core_structs import (
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    CODES,
    PROBLEM,
    STATES_BACKWARD,
    STATES_FORWARD,
    STEP,
    TENSOR,
    Struct,
    Words,
)
from fulmen.runtime.tensors import dense

_SCHEDULES = {name: CODES[name.upper()] for name in ("auto", "recurrent", "loop", "parallel", "recompute")}


def forward(p: Attention, output: Tensor, state: Tensor | None) -> None:
    _run(
        _Problem(p, c.header(ATTENTION_FORWARD)), ATTENTION_FORWARD, output=c.tensor(output), final_state=c.state(state)
    )


def backward(p: Attention, grad_output: Tensor | None, grad_state: Tensor | None, grads: Gradients) -> None:
    problem = _Problem(p, c.header(ATTENTION_BACKWARD))
    _run(
        problem,
        ATTENTION_BACKWARD,
        grad_output=problem.tensor(grad_output),
        grad_state=c.state(grad_state),
        dq=c.tensor(grads.q),
        **_gradients(grads),
    )


def states_forward(p: States, states: Tensor) -> None:
    stride_batch, stride_head, stride_chunk = states.stride()[:3]
    _run(
        _Problem(p, c.header(STATES_FORWARD)),
        STATES_FORWARD,
        chunk_size=p.chunk_size,
        states=states.data_ptr(),
        stride_batch=stride_batch,
        stride_head=stride_head,
        stride_chunk=stride_chunk,
    )


def states_backward(p: States, states: Tensor, grad_states: Tensor, grads: Gradients) -> None:
    states, grad_states = states.contiguous(), grad_states.contiguous()
    stride_batch, stride_head, stride_chunk = states.stride()[:3]
    _run(
        _Problem(p, c.header(STATES_BACKWARD)),
        STATES_BACKWARD,
        chunk_size=p.chunk_size,
        states=states.data_ptr(),
        stride_batch=stride_batch,
        stride_head=stride_head,
        stride_chunk=stride_chunk,
        grad_states=grad_states.data_ptr(),
        grad_stride_batch=stride_batch,
        grad_stride_head=stride_head,
        grad_stride_chunk=stride_chunk,
        **_gradients(grads),
    )


def step(p: Step, output: Tensor) -> None:
    q, k, v, state, log_decay, log_decay_v, scale = p
    batch, heads, key_size, value_size = state.shape
    if q.stride()[2] != 1 or k.stride()[2] != 1 or v.stride()[2] != 1:
        q, k, v = dense(q), dense(k), dense(v)
    form, form_v = p.form, DecayForm.of(log_decay_v, step=True)
    words = words_v = c.NO_TENSOR
    if log_decay is not None:
        log_decay = _readable(log_decay, form.by_channel)
        words = _token(log_decay) if form.has_tokens else _per_head(log_decay)
    if log_decay_v is not None:
        log_decay_v = _readable(log_decay_v)
        words_v = _token(log_decay_v)
    packed = STEP.pack(
        header=c.header(STEP),
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
        q=_token(q),
        k=_token(k),
        v=_token(v),
        log_decay=words,
        log_decay_v=words_v,
        state=c.state(state),
        output=_token(output),
    )
    c.require().run(STEP, packed)


def workspace_bytes(p: Attention, backward: bool = False) -> int:
    """The workspace of a call, in bytes; of its tensors only shapes and dtypes matter.

    >>> x = torch.empty(1).expand(1, 32768, 16, 128)      # one number
    >>> workspace_bytes(Attention(x, x, x, None, None, 1.0, None, None, "auto"))
    """
    like_q = c.tensor(p.q)
    if not backward:
        problem = _Problem(p, c.measuring_header(ATTENTION_FORWARD))
        packed = ATTENTION_FORWARD.pack(problem=problem.words, output=like_q, final_state=c.NO_STATE)
        return c.require().workspace_bytes(ATTENTION_FORWARD, packed)
    packed = ATTENTION_BACKWARD.pack(
        problem=_Problem(p, c.measuring_header(ATTENTION_BACKWARD)).words,
        grad_output=like_q,
        grad_state=c.NO_STATE,
        dq=like_q,
        **_gradients(Gradients(p.q, p.k, p.v, p.log_decay, p.log_decay_v, None)),
    )
    return c.require().workspace_bytes(ATTENTION_BACKWARD, packed)


class _Problem:
    """What calls on whole sequences have in common, as words; keeps alive the tensors that had to be copied for it."""

    def __init__(self, p: Attention | States, header: Words) -> None:
        self._kept: list[Tensor] = []
        self.bounds: tuple[Tensor, int] | None = None
        batch, length, key_heads, key_size = p.k.shape
        _, _, value_heads, value_size = p.v.shape
        sequences = offsets = 0
        if isinstance(p, Attention):
            query_heads, q, scale = p.q.shape[2], self.tensor(p.q), p.scale
            heads = max(query_heads, key_heads, value_heads)
            if p.cu_seqlens is not None:
                self.bounds = p.cu_seqlens.to(torch.int64).contiguous(), length
                sequences, offsets = self.bounds[0].shape[0] - 1, self.bounds[0].data_ptr()
        else:
            query_heads = heads = p.heads
            q, scale = c.NO_TENSOR, 1.0
        form, form_v = p.decays
        log_decay = None if p.log_decay is None else self._keep(p.log_decay, form.by_channel)
        self.words = PROBLEM.words(
            header=header,
            batch=batch,
            tokens=length,
            heads=heads,
            query_heads=query_heads,
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
            q=q,
            k=self.tensor(p.k),
            v=self.tensor(p.v),
            log_decay=_decay(log_decay),
            log_decay_v=self.tensor(p.log_decay_v),
            initial_state=c.state(p.initial_state),
        )

    def tensor(self, x: Tensor | None) -> Words:
        if x is None:
            return c.NO_TENSOR
        return c.tensor(x if x.is_contiguous() and x.dtype is not torch.float64 else self._keep(x))

    def _keep(self, x: Tensor, channels: bool = True) -> Tensor:
        readable = _readable(x, channels)
        if readable is not x:
            self._kept.append(readable)
        return readable


def _run(problem: _Problem, call: Struct, **fields: Words | int) -> None:
    try:
        c.require().run(call, call.pack(problem=problem.words, **fields))
    except c.RefusedError as error:
        if error.status == CODES["BAD_SEQUENCES"] and problem.bounds:
            packed_bounds(*problem.bounds)  # says what is wrong with cu_seqlens
        raise


def _readable(x: Tensor, channels: bool = True) -> Tensor:
    """An input as the core can read it: no float64 (which only a log-decay may have), and dense along its channels."""
    if x.dtype is torch.float64:
        x = x.float()
    return dense(x) if channels else x


def _token(x: Tensor) -> Words:
    """``[B, heads, size]`` or ``[B, heads]``: a tensor without tokens."""
    strides = x.stride()
    return TENSOR.words(
        data=x.data_ptr(), dtype=c.DTYPES[x.dtype], stride_batch=strides[0], stride_token=0, stride_head=strides[1]
    )


def _per_head(x: Tensor) -> Words:
    """``[H]``."""
    return TENSOR.words(
        data=x.data_ptr(), dtype=c.DTYPES[x.dtype], stride_batch=0, stride_token=0, stride_head=x.stride()[0]
    )


def _decay(x: Tensor | None) -> Words:
    """A log-decay of any form, or its gradient."""
    return c.tensor(x) if x is None or DecayForm.of(x).has_tokens else _per_head(x)


def _gradients(grads: Gradients) -> dict[str, Words]:
    return {
        "dk": c.tensor(grads.k),
        "dv": c.tensor(grads.v),
        "dlog_decay": _decay(grads.log_decay),
        "dlog_decay_v": c.tensor(grads.log_decay_v),
        "dinitial": c.state(grads.initial_state),
    }
