"""Linear attention as walks of :mod:`.walk`."""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.ops.linear_attention.problem import Attention, Gradients, States
from fulmen.ops.linear_attention.triton.boundaries import fill_boundary, new_boundaries, per_head, sum_heads
from fulmen.ops.linear_attention.triton.decay_gradients import DecayGradient, decay_gradients
from fulmen.ops.linear_attention.triton.launch import OTHER, Launcher, Rows
from fulmen.ops.linear_attention.triton.partition import partition_attention

# A gradient of a decay that subtracts starts again with every segment (:mod:`.decay_gradients`), so that rounding does
# not add up.
LONGEST_SEGMENT = 2048


def forward(run: Launcher, p: Attention, output: Tensor, state: Tensor | None) -> None:
    entering, leaving, rows = p.initial_state, state, run.rows("key", p.q, p.k, p.scale)
    if run.partition.segments > 1:
        entering, leaving = state_boundaries(run, p, precise=False), None
        if state is not None:
            state.copy_(entering[:, :, -1])
    into = per_head(run, "value", output)
    run.walk(
        rows.later, rows.earlier, p.v, into,
        walk="output", rows=rows, entering=entering, leaving=leaving,
    )  # fmt: skip
    sum_heads(into, output)


def backward(p: Attention, schedule: str, do: Tensor | None, grad_state: Tensor | None, grads: Gradients) -> None:
    """One axis after the other, so that what is prepared of the one is gone before the other's is made."""
    call = Backward(p, schedule, do, grad_state, grads)
    call.walk("value", (do, p.v), (None, grads.v))
    call.walk("key", (p.q, p.k), (grads.q, grads.k))
    call.run.clear_rest(*grads[:5])


class Backward:
    """One call. Where the schedule has one segment, but the gradient of a decay wants several, they are walked one by
    one.

    Args:
        do: the gradient of the output; None: nothing flows through it, and so not through q.
        grad_state: that of the final state.
    """

    def __init__(
        self, p: Attention, schedule: str, do: Tensor | None, grad_state: Tensor | None, grads: Gradients
    ) -> None:
        self.learned = grads.log_decay is not None or grads.log_decay_v is not None
        counted = p.decays.key.by_head and p.log_decay_v is None
        self.restarts = self.learned and do is not None and not counted
        small, longest = schedule == "recompute", LONGEST_SEGMENT if self.restarts else None
        self.p, self.do, self.grad_state, self.grads = p, do, grad_state, grads
        self.whole = Launcher(p, *partition_attention(p, schedule, learned=self.restarts), small=small)
        self.run = Launcher(p, *partition_attention(p, schedule, longest, self.restarts), small=small)
        self.at_once = self.whole.partition.segments > 1
        self.decays = decay_gradients(self.run, p, grads, through_states=do is None)
        self.boundaries: Tensor | None = None  # the states there, once they are known
        self.grad_boundaries: Tensor | None = None  # their gradients

    def walk(
        self, writes: str, factors: tuple[Tensor | None, Tensor], results: tuple[Tensor | None, Tensor | None]
    ) -> None:
        """Forward and backward in time, to what is requested on an axis.

        Args:
            factors: q and k, or do and v; results: their gradients.
        """
        p, decay, (later, earlier), (of_later, of_earlier) = self.p, self.decays[writes], factors, results
        read = (None if self.do is None else p.q, p.k) if writes == "value" else (self.do, p.v)
        forward_too = of_later is not None or (decay.requested and self.do is not None)
        backward_too = of_earlier is not None or decay.subtracts or (decay.requested and self.do is None) or (
            writes == "value" and self.grads.initial_state is not None
        )  # fmt: skip
        if forward_too or backward_too:
            rows = self.run.rows(OTHER[writes], *read, p.scale, precise=decay.requested)
            if forward_too:
                self.walk_forward(writes, rows, later, earlier, of_later, decay)
            if backward_too:
                self.walk_backward(writes, rows, later, earlier, of_earlier, decay)
        decay.finish()

    def walk_forward(
        self, writes: str, rows: Rows, later: Tensor | None, earlier: Tensor, result: Tensor | None,
        decay: DecayGradient,
    ) -> None:  # fmt: skip
        """dq, and the states at the boundaries where the gradient of a decay or several segments need them."""
        p, run = self.p, self.run
        if self.do is None or later is None:
            if result is not None:
                result.zero_()
            return
        entering, leaving, grad_entering = p.initial_state, None, self.grad_state
        if self.at_once:
            self.find_boundaries()
            if decay.requested and not decay.subtracts:
                grad_entering = self.find_grad_boundaries()
        known = self.boundaries is not None
        if not known and self.restarts:
            self.boundaries = leaving = new_boundaries(run, p)
            fill_boundary(self.boundaries[:, :, 0], p.initial_state)
        if self.boundaries is not None:
            entering = self.boundaries
        into = per_head(run, writes, result)
        walk = "dq" if writes == "key" else "output"
        run.walk(
            rows.later, rows.earlier, earlier, into, walk=walk, rows=rows, entering=entering, leaving=leaving,
            row_sums=decay.of_walk(walk, later, grad_entering), precise=self.learned, one_by_one=not known,
        )  # fmt: skip
        sum_heads(into, result)

    def walk_backward(
        self, writes: str, rows: Rows, later: Tensor | None, earlier: Tensor, result: Tensor | None,
        decay: DecayGradient,
    ) -> None:  # fmt: skip
        """dk or dv, the gradient of a decay, and with dv that of the initial state."""
        run, entering, carried = self.run, self.grad_state, None
        leaving = self.grads.initial_state if writes == "value" else None
        walk = "dk" if writes == "key" else "dv"
        boundaries = self.p.initial_state if self.do is None else self.boundaries
        row_sums = decay.of_walk(walk, earlier, boundaries)
        if self.at_once:
            entering, leaving = self.find_grad_boundaries(), None
            if result is None and row_sums is None:
                return
        elif row_sums is None:
            run = self.whole
        elif run.partition.segments > 1:
            entering = carried = self.p.k.new_empty(self.p.state_shape, dtype=torch.float32)
            fill_boundary(carried, self.grad_state)
        into = per_head(run, writes, result)
        run.walk(
            rows.earlier, rows.later, None if self.do is None else later, into, walk=walk, rows=rows,
            entering=entering, leaving=leaving if carried is None else carried,
            row_sums=row_sums, precise=row_sums is not None, one_by_one=carried is not None,
        )  # fmt: skip
        if leaving is not None and carried is not None:
            leaving.copy_(carried)
        sum_heads(into, result)

    def find_boundaries(self) -> None:
        if self.boundaries is None:
            self.boundaries = state_boundaries(self.run, self.p, precise=self.learned)

    def find_grad_boundaries(self) -> Tensor:
        """Of all segments; and what is requested of the initial state."""
        if self.grad_boundaries is None:
            self.grad_boundaries = new_boundaries(self.run, self.p)
            fill_boundary(self.grad_boundaries[:, :, -1], self.grad_state)
            y, z = (self.do, self.p.q) if self.run.summary_writes == "key" else (self.p.q, self.do)
            assert y is not None
            self.run.walk(
                None, y, z, None, walk="summary_backward", rows=Rows(None, y, self.p.scale),
                entering=None, leaving=self.grad_boundaries, precise=self.learned,
            )  # fmt: skip
            self.run.fold(self.grad_boundaries, backward=True)
            if self.grads.initial_state is not None:
                self.grads.initial_state.copy_(self.grad_boundaries[:, :, 0])
        return self.grad_boundaries


def states_forward(run: Launcher, p: States, states: Tensor, one_by_one: bool) -> None:
    """Of chunk_states: from the state at the first boundary to those at all."""
    walk_summary(run, p, states, entering=states if one_by_one else None, carry=one_by_one)
    if not one_by_one:
        run.fold(states)


def states_backward(run: Launcher, p: States, states: Tensor, entering: Tensor, grads: Gradients) -> None:
    """Of chunk_states: ``entering`` are the gradients of the ``states``, all that flows in included."""
    decays = decay_gradients(run, p, grads, through_states=True)
    learned = any(decay.requested for decay in decays.values())
    if learned and run.walk_precision(precise=True) != run.walk_precision(precise=False):
        # The forward's sums of rounded products are too coarse for it: once more, as precise as the walks below.
        initial, states = states[:, :, 0], torch.empty_like(states)
        fill_boundary(states[:, :, 0], initial)
        walk_summary(run, p, states, precise=True)
        run.fold(states)
    for writes, walk, read, factor, result in (
        ("key", "dk", p.v, p.k, grads.k),
        ("value", "dv", p.k, p.v, grads.v),
    ):
        decay = decays[writes]
        if result is not None or decay.requested:
            into = per_head(run, writes, result)
            run.walk(
                read, None, None, into, walk=walk, rows=Rows(None, read, 1.0), entering=entering,
                row_sums=decay.of_walk(walk, factor, states), precise=decay.requested,
            )  # fmt: skip
            sum_heads(into, result)
        decay.finish()


def state_boundaries(run: Launcher, p: Attention, precise: bool) -> Tensor:
    """The states at the boundaries of all segments, ``[sequences, H, segments + 1, D, E]``."""
    boundaries = new_boundaries(run, p)
    fill_boundary(boundaries[:, :, 0], p.initial_state)
    walk_summary(run, p, boundaries, precise=precise)
    run.fold(boundaries)
    return boundaries


def walk_summary(
    run: Launcher, p: Attention | States, boundaries: Tensor,
    entering: Tensor | None = None, precise: bool = False, carry: bool = False,
) -> None:  # fmt: skip
    """What each segment adds to the state, at the boundary after it."""
    y, z = (p.v, p.k) if run.summary_writes == "key" else (p.k, p.v)
    run.walk(
        None, y, z, None, walk="summary", rows=Rows(None, y, 1.0),
        entering=entering, leaving=boundaries, precise=precise, carry=carry,
    )  # fmt: skip
