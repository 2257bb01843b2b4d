"""Linear attention where all channels of a token decay alike, or nothing decays: as walks of :mod:`.walk`. What
writes the value axis, output and dv, also where the keys' channels decay each by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.ops.linear_attention.problem import Attention, Gradients, States
from fulmen.ops.linear_attention.triton.boundaries import fill_boundary, new_boundaries, per_head, sum_heads
from fulmen.ops.linear_attention.triton.decay_gradients import ScalarDecayGradient
from fulmen.ops.linear_attention.triton.launch import Launcher, Rows, partition_attention

# The gradient of a decay starts again with every segment (:func:`.walk.sum_decay_gradient`), so that rounding does not
# add up.
LONGEST_SEGMENT = 2048


def forward(run: Launcher, p: Attention, output: Tensor, state: Tensor | None) -> None:
    entering, leaving, rows = p.initial_state, state, run.prepare(p)
    if run.partition.segments > 1:
        entering, leaving = state_boundaries(run, p, rows, precise=False), None
        if state is not None:
            state.copy_(entering[:, :, -1])
    run.walk(
        rows.q, rows.k, p.v, output, walk="output", scale=rows.scale, entering=entering, leaving=leaving,
        scores=rows.scores, totals=rows.totals,
    )  # fmt: skip


def backward(
    p: Attention, schedule: str, do: Tensor | None, grad_state: Tensor | None, grads: Gradients
) -> None:  # fmt: skip
    """Where the schedule has one segment, but the gradient of a decay wants several, they are walked one by one."""
    small, longest = schedule == "recompute", LONGEST_SEGMENT if grads.log_decay is not None else None
    whole = Launcher(p, *partition_attention(p, schedule), small=small)
    run = Launcher(p, *partition_attention(p, schedule, longest), small=small)
    at_once = whole.partition.segments > 1
    decay = ScalarDecayGradient(run, p.k, grads.log_decay, walks=1 if do is None else 2)

    boundaries = None
    if grads.q is not None or decay.requested:
        boundaries = walk_forward(run, p, do, decay, grads, at_once)
    if grads.k is grads.v is grads.initial_state is None and not decay.requested:
        return
    if at_once and do is not None:
        entering = grad_boundaries(run, p, do, grad_state, precise=decay.requested)
        if grads.initial_state is not None:
            grads.initial_state.copy_(entering[:, :, 0])
        walk_dk(run, p, do, entering, None, boundaries, decay, grads)
        walk_dv(run, p, do, entering, None, grads)
    else:
        carried = None
        if run.partition.segments > 1:
            carried = p.k.new_zeros(p.state_shape, dtype=torch.float32) if grad_state is None else grad_state.float()
            carried = carried.clone() if carried is grad_state else carried
        walk_dk(run, p, do, grad_state if carried is None else carried, carried, boundaries, decay, grads)
        walk_dv(whole, p, do, grad_state, grads.initial_state, grads)
    decay.finish()


def states_backward(run: Launcher, p: States, states: Tensor, entering: Tensor, grads: Gradients) -> None:
    """Of chunk_states: ``entering`` are the gradients of the ``states``, all that flows in included."""
    decay = ScalarDecayGradient(run, p.k, grads.log_decay, walks=1)
    walk_dk(run, p, None, entering, None, states, decay, grads)
    walk_dv(run, p, None, entering, None, grads)
    decay.finish()


def walk_forward(
    run: Launcher, p: Attention, do: Tensor | None, decay: ScalarDecayGradient, grads: Gradients, at_once: bool
) -> Tensor | None:
    """dq, and the states at the boundaries where the gradient of the decay or several segments need them."""
    if do is None:
        if grads.q is not None:
            grads.q.zero_()
        return state_boundaries(run, p, run.prepare(p), precise=True) if decay.requested else None
    entering, leaving, boundaries = p.initial_state, None, None
    if at_once:
        entering = boundaries = state_boundaries(run, p, run.prepare(p), precise=decay.requested)
    elif decay.requested:
        entering = leaving = boundaries = new_boundaries(run, p)
        fill_boundary(boundaries[:, :, 0], p.initial_state)
    dq = per_head(grads.q, run.heads)
    run.walk(
        do, p.v, p.k, dq, walk="dq", scale=p.scale, entering=entering, leaving=leaving,
        row_sums=decay.of_walk("dq", p.q), precise=decay.requested, one_by_one=not at_once,
    )  # fmt: skip
    sum_heads(dq, grads.q)
    return boundaries


def walk_dk(
    run: Launcher,
    p: Attention | States,
    do: Tensor | None,
    entering: Tensor | None,
    leaving: Tensor | None,
    boundaries: Tensor | None,
    decay: ScalarDecayGradient,
    grads: Gradients,
) -> None:
    """``entering``: the gradients of the states at the segments' boundaries, ``boundaries`` the states themselves;
    with ``leaving``, the segments are walked one by one, and both are the one state that is carried along."""
    if grads.k is None and not decay.requested:
        return
    dk = per_head(grads.k, run.heads)
    q, scale = q_and_scale(p, do)
    run.walk(
        p.v, do, q, dk, walk="dk", scale=scale, entering=entering, leaving=leaving,
        row_sums=decay.of_walk("dk", p.k, boundaries), precise=decay.requested, one_by_one=leaving is not None,
    )  # fmt: skip
    sum_heads(dk, grads.k)


def walk_dv(
    run: Launcher,
    p: Attention | States,
    do: Tensor | None,
    entering: Tensor | None,
    leaving: Tensor | None,
    grads: Gradients,
) -> None:
    if grads.v is None and leaving is None:
        return
    dv = per_head(grads.v, run.heads)
    if isinstance(p, Attention) and do is not None:
        rows = run.prepare(p)
        run.walk(
            rows.k, rows.q, do, dv, walk="dv", scale=rows.scale, entering=entering, leaving=leaving,
            scores=rows.scores, totals=rows.totals,
        )  # fmt: skip
    else:
        run.walk(p.k, None, None, dv, walk="dv", scale=1.0, entering=entering, leaving=leaving)
    sum_heads(dv, grads.v)


def q_and_scale(p: Attention | States, do: Tensor | None) -> tuple[Tensor | None, float]:
    """Without a gradient of the output nothing flows through q."""
    return (p.q, p.scale) if isinstance(p, Attention) and do is not None else (None, 1.0)


def state_boundaries(run: Launcher, p: Attention, rows: Rows, precise: bool) -> Tensor:
    """The states at the boundaries of all segments, ``[sequences, H, segments + 1, D, E]``."""
    boundaries = new_boundaries(run, p)
    fill_boundary(boundaries[:, :, 0], p.initial_state)
    run.walk(
        None, rows.k, p.v, None, walk="summary", scale=1.0, entering=None, leaving=boundaries,
        totals=rows.totals, precise=precise,
    )  # fmt: skip
    run.fold(boundaries)
    return boundaries


def grad_boundaries(run: Launcher, p: Attention, do: Tensor, grad_state: Tensor | None, precise: bool) -> Tensor:
    """The gradients of these states."""
    boundaries = new_boundaries(run, p)
    fill_boundary(boundaries[:, :, -1], grad_state)
    run.walk(
        None, p.q, do, None,
        walk="summary_backward", scale=p.scale, entering=None, leaving=boundaries, precise=precise,
    )  # fmt: skip
    run.fold(boundaries, backward=True)
    return boundaries
