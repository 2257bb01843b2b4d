"""The Triton backend, for NVIDIA and AMD GPUs.

A sequence is partitioned into segments, and a program walks the chunks of a segment with the state in registers
(:mod:`~fulmen.ops.linear_attention.triton.walk`, and :mod:`~fulmen.ops.linear_attention.triton.scan` where the channels
of the values decay). With one segment ("loop") that is all. With several, their states are
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
from fulmen.ops.linear_attention.triton.boundaries import fill_boundary, new_boundaries, per_head, sum_heads
from fulmen.ops.linear_attention.triton.decay_gradients import DecayGradient
from fulmen.ops.linear_attention.triton.launch import Launcher, partition_attention
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
    if run.walks_serve:
        walks.forward(run, p, output, state)
        return
    entering, leaving = p.initial_state, state
    if run.partition.segments > 1:
        entering, leaving = state_boundaries(run, p), None
        if state is not None:
            state.copy_(entering[:, :, -1])
    run.scan(
        p.q, p.k, p.v, output,
        walk="output", scale=p.scale, entering=entering, leaving=leaving,
    )  # fmt: skip


@on_its_device
def backward(p: Attention, grad_output: Tensor | None, grad_state: Tensor | None, grads: Gradients) -> None:
    p = with_readable_rows(p)
    do = None if grad_output is None else readable(grad_output)
    schedule = "loop" if p.schedule == "recurrent" or do is None else p.schedule
    run = Launcher(p, *partition_attention(p, schedule), small=schedule == "recompute")
    if run.walks_serve:
        walks.backward(p, schedule, do, grad_state, grads)
        run.clear_rest(grads.q, grads.k, grads.v, grads.log_decay)
        return
    key = DecayGradient(run, p.k, grads.log_decay, "key", walks=2 if do is not None else 1)
    value = DecayGradient(run, p.v, grads.log_decay_v, "value", walks=2 if do is not None else 1)

    boundaries = walk_forward(run, p, do, (key, value), grads)
    walk_backward(run, p, do, grad_state, boundaries, (key, value), grads)
    run.clear_rest(grads.q, grads.k, grads.v, grads.log_decay, grads.log_decay_v)


def walk_forward(
    run: Launcher, p: Attention, do: Tensor | None, decays: tuple[DecayGradient, DecayGradient], grads: Gradients
) -> Tensor | None:
    """dq, and the first halves of the decays' gradients. Their second halves need the states that are returned."""
    key, value = decays
    entering, boundaries, decays_requested = p.initial_state, None, key.requested or value.requested
    if grads.q is None and not decays_requested:
        return None
    if run.partition.segments > 1 or (do is None and decays_requested):
        entering = boundaries = state_boundaries(run, p)
    elif decays_requested:
        boundaries = p.k.new_empty(p.state_shape, dtype=torch.float32)
    if do is None:
        if grads.q is not None:
            grads.q.zero_()
        return boundaries
    leaving = boundaries if run.partition.segments == 1 else None
    dq = per_head(run, grads.q)
    run.scan(
        do, p.v, p.k, dq,
        walk="dq", scale=p.scale, entering=entering, leaving=leaving, gradient=key.walk(p.q),
    )  # fmt: skip
    sum_heads(dq, grads.q)
    del dq
    if value.requested:
        run.scan(
            p.q, p.k, p.v, None,
            walk="output", scale=p.scale, entering=entering, gradient=value.walk(do),
        )  # fmt: skip
    return boundaries


def walk_backward(
    run: Launcher,
    p: Attention,
    do: Tensor | None,
    grad_state: Tensor | None,
    boundaries: Tensor | None,
    decays: tuple[DecayGradient, DecayGradient],
    grads: Gradients,
) -> None:
    """dk, dv, the gradient of the initial state, and the second halves of the decays' gradients."""
    if grads.k is grads.v is grads.initial_state is None and not any(decay.requested for decay in decays):
        return
    entering, leaving = grad_state, grads.initial_state
    if run.partition.segments > 1 and do is not None:
        entering, leaving = grad_boundaries(run, p, do, grad_state), None
        if grads.initial_state is not None:
            grads.initial_state.copy_(entering[:, :, 0])
    backward_from_states(run, p, do, entering, leaving, boundaries, decays, grads)


def backward_from_states(
    run: Launcher,
    p: Attention | States,
    do: Tensor | None,
    entering: Tensor | None,
    leaving: Tensor | None,
    boundaries: Tensor | None,
    decays: tuple[DecayGradient, DecayGradient],
    grads: Gradients,
) -> None:
    """The walks backward in time. ``entering`` are the gradients of the states at the segments' boundaries,
    ``boundaries`` the states themselves, which only the decays' gradients need; without ``do`` nothing else flows into
    the gradient."""
    (key, value), q, scale = decays, None, 1.0
    if isinstance(p, Attention) and do is not None:
        q, scale = p.q, p.scale
    if grads.k is not None or key.requested:
        dk = per_head(run, grads.k)
        run.scan(
            p.v, do, q, dk,
            walk="dk", scale=scale, entering=entering, gradient=key.walk(p.k, boundaries),
        )  # fmt: skip
        sum_heads(dk, grads.k)
        del dk
    if grads.v is not None or value.requested or leaving is not None:
        dv = per_head(run, grads.v)
        run.scan(
            p.k, q, do, dv, walk="dv", scale=scale,
            entering=entering, leaving=leaving, gradient=value.walk(p.v, boundaries),
        )  # fmt: skip
        sum_heads(dv, grads.v)
    key.finish()
    value.finish()


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
    run.summarise(p.k, p.v, states, carry=one_by_one)
    if not one_by_one:
        run.fold(states)


@on_its_device
def states_backward(p: States, states: Tensor, grad_states: Tensor, grads: Gradients) -> None:
    p = with_readable_rows(p)
    run = Launcher(p, *partition_states(p), small=p.schedule == "recompute")
    entering = grad_states.clone(memory_format=torch.contiguous_format)
    if p.k.shape[1] > 0:
        run.fold(entering, backward=True)
        # What is prepared is of chunks that segments consist of, and here a segment may have any number of tokens.
        if run.walks_serve and not run.of_keys:
            walks.states_backward(run, p, states, entering, grads)
    if p.k.shape[1] > 0 and (run.of_keys or not run.walks_serve):
        key = DecayGradient(run, p.k, grads.log_decay, "key", walks=1)
        value = DecayGradient(run, p.v, grads.log_decay_v, "value", walks=1)
        backward_from_states(run, p, None, entering, None, states, (key, value), grads)
    if grads.initial_state is not None:
        grads.initial_state.copy_(entering[:, :, 0])


def state_boundaries(run: Launcher, p: Attention) -> Tensor:
    """The states at the boundaries of all segments, ``[sequences, H, segments + 1, D, E]``."""
    boundaries = new_boundaries(run, p)
    fill_boundary(boundaries[:, :, 0], p.initial_state)
    run.summarise(p.k, p.v, boundaries)
    run.fold(boundaries)
    return boundaries


def grad_boundaries(run: Launcher, p: Attention, do: Tensor, grad_state: Tensor | None) -> Tensor:
    """The gradients of these states."""
    boundaries = new_boundaries(run, p)
    fill_boundary(boundaries[:, :, -1], grad_state)
    run.summarise(p.q, do, boundaries, backward=True, scale=p.scale)
    run.fold(boundaries, backward=True)
    return boundaries


def partition_states(p: States) -> tuple[Partition, int]:
    """A segment is a chunk."""
    batch, length = p.k.shape[:2]
    return Partition(None, length, (length + p.chunk_size - 1) // p.chunk_size, p.chunk_size), batch


def with_readable_rows(p: AnyCall) -> AnyCall:
    """The call with k, v and q copied where kernels cannot read them. (The launcher sees to decays and states.)"""
    p = p._replace(k=readable(p.k), v=readable(p.v))
    return p._replace(q=readable(p.q)) if isinstance(p, Attention) else p
