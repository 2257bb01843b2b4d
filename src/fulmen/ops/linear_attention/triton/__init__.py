"""The Triton backend, for NVIDIA and AMD GPUs.

A sequence is partitioned into segments, and a program walks the chunks of a segment with the state in registers
(:mod:`~fulmen.ops.linear_attention.triton.walk`). With one segment ("loop") that is all. With several, their states are
found first: summarise each segment, then fold the summaries. "parallel" has a segment for every 128 tokens, "auto" as
few as fill the card. The backward walks forward in time for dq, and backward in time for dk and for dv.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from fulmen.ops.chunks.decay_form import as_sequence
from fulmen.ops.linear_attention.problem import Attention, Gradients, States, Step
from fulmen.ops.linear_attention.triton import walks
from fulmen.ops.linear_attention.triton.boundaries import fill_boundary
from fulmen.ops.linear_attention.triton.launch import Launcher
from fulmen.ops.linear_attention.triton.partition import partition_attention
from fulmen.triton_common.launching import on_its_device
from fulmen.triton_common.operands import Partition, readable

AnyCall = TypeVar("AnyCall", Attention, States)


@on_its_device
def forward(p: Attention, output: Tensor, state: Tensor | None) -> None:
    p = with_readable_rows(p)
    run = Launcher(p, *partition_attention(p, p.schedule), small=False)
    run.clear_rest(output)
    if p.schedule == "recurrent":
        run.recur(p.q, p.k, p.v, output, p.scale, p.initial_state, state)
        return
    walks.forward(run, p, output, state)


@on_its_device
def backward(p: Attention, grad_output: Tensor | None, grad_state: Tensor | None, grads: Gradients) -> None:
    p = with_readable_rows(p)
    do = None if grad_output is None else readable(grad_output)
    schedule = "loop" if p.schedule == "recurrent" or do is None else p.schedule
    walks.backward(p, schedule, do, grad_state, grads)


@on_its_device
def step(p: Step, output: Tensor) -> None:
    """A sequence of one token, its state updated where it is."""
    log_decay, log_decay_v = as_sequence(p.log_decay), as_sequence(p.log_decay_v)
    q, k, v = p.q[:, None], p.k[:, None], p.v[:, None]
    whole = with_readable_rows(Attention(q, k, v, log_decay, log_decay_v, p.scale, p.state, None, "recurrent"))
    run = Launcher(whole, *partition_attention(whole, "recurrent"), small=False)
    run.recur(whole.q, whole.k, whole.v, output[:, None], p.scale, p.state, p.state)


@on_its_device
def states_forward(p: States, states: Tensor) -> None:
    p = with_readable_rows(p)
    run = Launcher(p, *partition_states(p), small=False)
    fill_boundary(states[:, :, 0], p.initial_state)
    if p.k.shape[1] == 0:
        return
    one_by_one = p.schedule in ("loop", "recurrent") or (p.schedule == "auto" and run.heads_fill_the_card)
    walks.states_forward(run, p, states, one_by_one)


@on_its_device
def states_backward(p: States, states: Tensor, grad_states: Tensor, grads: Gradients) -> None:
    p = with_readable_rows(p)
    run = Launcher(p, *partition_states(p), small=p.schedule == "recompute")
    entering = grad_states.clone(memory_format=torch.contiguous_format)
    if p.k.shape[1] > 0:
        run.fold(entering, backward=True)
        walks.states_backward(run, p, states, entering, grads)
    if grads.initial_state is not None:
        grads.initial_state.copy_(entering[:, :, 0])


def partition_states(p: States) -> tuple[Partition, int]:
    """A segment is a chunk."""
    batch, length = p.k.shape[:2]
    return Partition(None, length, (length + p.chunk_size - 1) // p.chunk_size, p.chunk_size), batch


def with_readable_rows(p: AnyCall) -> AnyCall:
    """The call with k, v and q copied where kernels cannot read them. (The launcher sees to decays and states.)"""
    p = p._replace(k=readable(p.k), v=readable(p.v))
    return p._replace(q=readable(p.q)) if isinstance(p, Attention) else p
