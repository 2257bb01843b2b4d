"""The CPU core's linear attention (csrc/): describes a call to it, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.ops.chunks.native import Problem, Token, decay
from fulmen.ops.linear_attention.problem import Attention, Gradients, States, Step
from fulmen.runtime import core as c
from fulmen.runtime.core_structs import (
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    STATES_BACKWARD,
    STATES_FORWARD,
    STEP,
    Struct,
    Words,
)

_UNWEIGHED = {"value_weights": c.NO_TENSOR, "skip": c.NO_TENSOR}


def forward(p: Attention, output: Tensor, state: Tensor | None) -> None:
    results = {"output": c.tensor(output), "final_state": c.state(state)}
    _run(_problem(p, c.header(ATTENTION_FORWARD)), ATTENTION_FORWARD, **results, **_UNWEIGHED)


def backward(p: Attention, grad_output: Tensor | None, grad_state: Tensor | None, grads: Gradients) -> None:
    problem = _problem(p, c.header(ATTENTION_BACKWARD))
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
        Problem(p, c.header(STATES_FORWARD)),
        STATES_FORWARD,
        chunk_size=p.chunk_size,
        states=states.data_ptr(),
        stride_batch=stride_batch,
        stride_head=stride_head,
        stride_chunk=stride_chunk,
    )


def states_backward(p: States, states: Tensor, grad_states: Tensor, grads: Gradients) -> None:
    in_pairs = c.require().multiplies_pairs and p.k.dtype == torch.bfloat16 and p.log_decay_v is None
    if in_pairs and grads.log_decay is not None:
        # The forward's sums of rounded products are too coarse for it: once more in float32.
        states = torch.empty_like(states)
        states_forward(p._replace(k=p.k.float(), v=p.v.float()), states)
    states, grad_states = states.contiguous(), grad_states.contiguous()
    stride_batch, stride_head, stride_chunk = states.stride()[:3]
    _run(
        Problem(p, c.header(STATES_BACKWARD)),
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
    token = Token(c.header(STEP), *p, output)
    c.require().run(STEP, STEP.pack_words(token.words))


def workspace_bytes(p: Attention, backward: bool = False) -> int:
    """The workspace of a call, in bytes; of its tensors only shapes and dtypes matter.

    >>> x = torch.empty(1).expand(1, 32768, 16, 128)      # one number
    >>> workspace_bytes(Attention(x, x, x, None, None, 1.0, None, None, "auto"))
    """
    like_q = c.tensor(p.q)
    if not backward:
        problem = _problem(p, c.measuring_header(ATTENTION_FORWARD))
        results = {"output": like_q, "final_state": c.NO_STATE}
        packed = ATTENTION_FORWARD.pack(problem=problem.words, **results, **_UNWEIGHED)
        return c.require().workspace_bytes(ATTENTION_FORWARD, packed)
    packed = ATTENTION_BACKWARD.pack(
        problem=_problem(p, c.measuring_header(ATTENTION_BACKWARD)).words,
        grad_output=like_q,
        grad_state=c.NO_STATE,
        dq=like_q,
        **_gradients(Gradients(p.q, p.k, p.v, p.log_decay, p.log_decay_v, None)),
    )
    return c.require().workspace_bytes(ATTENTION_BACKWARD, packed)


def _problem(p: Attention, header: Words) -> Problem:
    return Problem(p, header, p.q, p.scale, p.cu_seqlens)


def _run(problem: Problem, call: Struct, **fields: Words | int) -> None:
    problem.run(call, call.pack(problem=problem.words, **fields))


def _gradients(grads: Gradients) -> dict[str, Words]:
    return {
        "dk": c.tensor(grads.k),
        "dv": c.tensor(grads.v),
        "dlog_decay": decay(grads.log_decay),
        "dlog_decay_v": c.tensor(grads.log_decay_v),
        "dinitial": c.state(grads.initial_state),
    }
