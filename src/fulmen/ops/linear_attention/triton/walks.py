"""Linear attention as walks of :mod:`.walk`: where all channels of a token decay alike, nothing decays, or the channels
of the keys decay each by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.ops.linear_attention.problem import Attention, Gradients, States
from fulmen.ops.linear_attention.triton.boundaries import fill_boundary, new_boundaries, per_head, sum_heads
from fulmen.ops.linear_attention.triton.decay_gradients import KeyDecayGradient, ScalarDecayGradient
from fulmen.ops.linear_attention.triton.launch import Launcher, Rows, partition_attention

# The gradient of a decay starts again with every segment (:mod:`.walk`), so that rounding does not add up.
LONGEST_SEGMENT = 2048

DecayGradient = KeyDecayGradient | ScalarDecayGradient


def forward(run: Launcher, p: Attention, output: Tensor, state: Tensor | None) -> None:
    entering, leaving, rows = p.initial_state, state, run.prepare(p)
    if run.partition.segments > 1:
        entering, leaving = state_boundaries(run, p, rows, precise=False), None
        if state is not None:
            state.copy_(entering[:, :, -1])
    run.walk(
        rows.q, rows.k, p.v, output,
        walk="output", scale=rows.scale, entering=entering, leaving=leaving, rows=rows,
    )  # fmt: skip


def backward(
    p: Attention, schedule: str, do: Tensor | None, grad_state: Tensor | None, grads: Gradients
) -> None:  # fmt: skip
    """Where the schedule has one segment, but the gradient of a decay wants several, they are walked one by one."""
    small, longest = schedule == "recompute", LONGEST_SEGMENT if grads.log_decay is not None else None
    whole = Launcher(p, *partition_attention(p, schedule), small=small)
    run = Launcher(p, *partition_attention(p, schedule, longest), small=small)
    at_once = whole.partition.segments > 1
    decay, rows = decay_gradient(run, p, grads, walks=1 if do is None else 2), run.prepare(p)

    boundaries = None
    if grads.q is not None or decay.requested:
        boundaries = walk_forward(run, p, rows, do, decay, grads, at_once)
    if grads.k is grads.v is grads.initial_state is None and not decay.requested:
        return
    if at_once and do is not None:
        entering = grad_boundaries(run, p, rows, do, grad_state, precise=decay.requested)
        if grads.initial_state is not None:
            grads.initial_state.copy_(entering[:, :, 0])
        walk_dk(run, p, rows, do, entering, None, boundaries, decay, grads)
        walk_dv(run, p, rows, do, entering, None, grads)
    else:
        carried = None
        if run.partition.segments > 1:
            carried = p.k.new_zeros(p.state_shape, dtype=torch.float32) if grad_state is None else grad_state.float()
            carried = carried.clone() if carried is grad_state else carried
        walk_dk(run, p, rows, do, grad_state if carried is None else carried, carried, boundaries, decay, grads)
        walk_dv(whole, p, rows, do, grad_state, grads.initial_state, grads)
    decay.finish()


def states_backward(run: Launcher, p: States, states: Tensor, entering: Tensor, grads: Gradients) -> None:
    """Of chunk_states: ``entering`` are the gradients of the ``states``, all that flows in included."""
    decay, rows = decay_gradient(run, p, grads, walks=1), run.prepare(p)
    walk_dk(run, p, rows, None, entering, None, states, decay, grads)
    walk_dv(run, p, rows, None, entering, None, grads)
    decay.finish()


def decay_gradient(run: Launcher, p: Attention | States, grads: Gradients, walks: int) -> DecayGradient:
    """``walks``: 2, or 1 where there is only the one backward in time."""
    if run.of_keys:
        return KeyDecayGradient(grads.log_decay)
    return ScalarDecayGradient(run, p.k, grads.log_decay, walks)


def walk_forward(
    run: Launcher, p: Attention, rows: Rows, do: Tensor | None, decay: DecayGradient, grads: Gradients, at_once: bool
) -> Tensor | None:  # fmt: skip
    """dq, and the states at the boundaries where the gradient of the decay or several segments need them."""
    if do is None:
        if grads.q is not None:
            grads.q.zero_()
        return state_boundaries(run, p, rows, precise=True) if decay.requested else None
    entering, leaving, boundaries = p.initial_state, None, None
    if at_once:
        entering = boundaries = state_boundaries(run, p, rows, precise=decay.requested)
    elif decay.requested:
        entering = leaving = boundaries = new_boundaries(run, p)
        fill_boundary(boundaries[:, :, 0], p.initial_state)
    dq = per_head(run, grads.q)
    run.walk(
        do, p.v, p.k, dq, walk="dq", scale=p.scale, entering=entering, leaving=leaving, rows=rows,
        row_sums=decay.of_walk("dq", p.q), precise=decay.requested, one_by_one=not at_once,
    )  # fmt: skip
    run.add_merged_pairs(p, do, rows, dq=dq)
    sum_heads(dq, grads.q)
    return boundaries


def walk_dk(
    run: Launcher,
    p: Attention | States,
    rows: Rows,
    do: Tensor | None,
    entering: Tensor | None,
    leaving: Tensor | None,
    boundaries: Tensor | None,
    decay: DecayGradient,
    grads: Gradients,
) -> None:
    """``entering``: the gradients of the states at the segments' boundaries, ``boundaries`` the states themselves;
    with ``leaving``, the segments are walked one by one, and both are the one state that is carried along."""
    if grads.k is None and not decay.requested:
        return
    dk = per_head(run, grads.k)
    # Without a gradient of the output nothing flows through q.
    q, scale = (p.q, p.scale) if isinstance(p, Attention) and do is not None else (None, 1.0)
    run.walk(
        p.v, do, q, dk, walk="dk", scale=scale, entering=entering, leaving=leaving, rows=rows,
        row_sums=decay.of_walk("dk", p.k, boundaries), precise=decay.requested, one_by_one=leaving is not None,
    )  # fmt: skip
    if isinstance(p, Attention) and do is not None:
        run.add_merged_pairs(p, do, rows, dk=dk, gradient=grads.log_decay)
    sum_heads(dk, grads.k)


def walk_dv(
    run: Launcher,
    p: Attention | States,
    rows: Rows,
    do: Tensor | None,
    entering: Tensor | None,
    leaving: Tensor | None,
    grads: Gradients,
) -> None:
    if grads.v is None and leaving is None:
        return
    dv = per_head(run, grads.v)
    q, scale = (None, 1.0) if do is None else (rows.q, rows.scale)
    run.walk(
        rows.k, q, do, dv, walk="dv", scale=scale, entering=entering, leaving=leaving, rows=rows
    )  # fmt: skip
    sum_heads(dv, grads.v)


def state_boundaries(run: Launcher, p: Attention, rows: Rows, precise: bool) -> Tensor:
    """The states at the boundaries of all segments, ``[sequences, H, segments + 1, D, E]``."""
    boundaries = new_boundaries(run, p)
    fill_boundary(boundaries[:, :, 0], p.initial_state)
    run.walk(
        None, p.v, p.k, None,
        walk="summary", scale=1.0, entering=None, leaving=boundaries, rows=rows, precise=precise,
    )  # fmt: skip
    run.fold(boundaries)
    return boundaries


def grad_boundaries(
    run: Launcher, p: Attention, rows: Rows, do: Tensor, grad_state: Tensor | None, precise: bool
) -> Tensor:  # fmt: skip
    """The gradients of these states."""
    boundaries = new_boundaries(run, p)
    fill_boundary(boundaries[:, :, -1], grad_state)
    run.walk(
        None, do, p.q, None,
        walk="summary_backward", scale=p.scale, entering=None, leaving=boundaries, rows=rows, precise=precise,
    )  # fmt: skip
    run.fold(boundaries, backward=True)
    return boundaries
