"""The chunked form in torch matmuls: portable to every device torch has.

A sequence is walked in segments, and a segment in chunks. In a chunk, with b the sum of a from its start,

    o_i   = q_i·(e^{b_i} ⊙ S_in) + Σ_{j≤i} (q_i ⊙ e^{b_i-b_j})·k_j v_j
    S_out = e^{b_C} ⊙ S_in + Σ_j (e^{b_C-b_j} ⊙ k_j) v_jᵀ

where the weights e^{...} are built by doubling (:mod:`fulmen.ops.chunks.weights`) and the sum over j ≤ i is
:mod:`fulmen.ops.linear_attention.inside_chunk`. A segment of one chunk is the "loop" schedule, a segment of all chunks
"parallel"; "auto" takes as many as stay in cache, so that the workspace does not grow with the sequence; "recurrent"
has chunks of one token. The backward keeps one state for each segment and recomputes the rest.
"""

from __future__ import annotations

from torch import Tensor

from fulmen.ops.chunks.decay_form import DecayForm
from fulmen.ops.chunks.segments import (
    BACKWARD_SEGMENTS,
    CHUNK,
    FORWARD_SEGMENTS,
    Chunks,
    Loader,
    add_decay_gradient,
    partition,
    store,
)
from fulmen.ops.chunks.sequences import new_state
from fulmen.ops.chunks.weights import sum_before, sum_channels, sum_from
from fulmen.ops.linear_attention import reference
from fulmen.ops.linear_attention.inside_chunk import channel_backward, channel_forward, scalar_backward, scalar_forward
from fulmen.ops.linear_attention.problem import Attention, Gradients, States

step = reference.step  # one token has nothing to chunk


def forward(p: Attention, output: Tensor, state: Tensor | None) -> None:
    for part, tokens, row in p.sequences():
        final = forward_sequence(part, output[:, tokens])
        if state is not None:
            state[row] = final


def forward_sequence(p: Attention, output: Tensor) -> Tensor:
    """Write the output of one sequence (or a batch of equal length) and return its final state."""
    loader = Loader(p)
    state = new_state(p.initial_state, p.state_shape, p.k)
    for segment in partition(p, chunk_size(p), FORWARD_SEGMENTS[p.schedule]):
        q = loader.load(p.q, segment)
        if p.scale != 1.0:
            q *= p.scale
        if loader.scalar:
            chunks, pairs = loader.chunks_and_pair_weights(segment)
            out = scalar_forward(q, chunks.k, chunks.v, pairs)
        else:
            chunks = loader.chunks(segment)
            out = channel_forward(q, chunks.k, chunks.v, chunks.a, chunks.c)
        states = chunks.leave().contributions()
        state = chunks.scan_states(states, state)
        out += chunks.c.weigh_entering(chunks.a.weigh_entering(q) @ states)
        store(output, segment, out)
    return state


def backward(p: Attention, grad_output: Tensor | None, grad_state: Tensor | None, grads: Gradients) -> None:
    for part, tokens, row in p.sequences():
        do = p.v.new_zeros(()).expand(part.output_shape) if grad_output is None else grad_output[:, tokens]
        backward_sequence(part, do, None if grad_state is None else grad_state[row], grads.select(tokens, row))


def backward_sequence(p: Attention, grad_output: Tensor, grad_state: Tensor | None, grads: Gradients) -> None:
    loader = Loader(p)
    segments = partition(p, chunk_size(p), BACKWARD_SEGMENTS[p.schedule])
    entering = [new_state(p.initial_state, p.state_shape, p.k)]
    for segment in segments[:-1]:
        chunks = loader.chunks(segment).leave()
        entering.append(chunks.scan_states(chunks.contributions(), entering[-1]))
    grad_state = new_state(grad_state, p.state_shape, p.k)
    for segment in reversed(segments):
        # q holds the scale from here on: o = (scale·q)·S, and only dq has to know.
        q = loader.load(p.q, segment) * p.scale
        do = loader.load(grad_output, segment)
        if loader.scalar:
            chunks, pairs = loader.chunks_and_pair_weights(segment)
            da, dc = decay_accumulators(chunks, grads)
            dq, dk, dv = scalar_backward(q, chunks.k, chunks.v, do, pairs, da)
        else:
            chunks = loader.chunks(segment)
            da, dc = decay_accumulators(chunks, grads)
            dq, dk, dv = channel_backward(q, chunks.k, chunks.v, do, chunks.a, chunks.c, da, dc)
        states = chunks.leave().contributions()
        chunks.scan_states(states, entering.pop())
        q, do = chunks.a.weigh_entering(q), chunks.c.weigh_entering(do)
        grad_states = q.mT @ do
        grad_state = chunks.scan_gradients(grad_states, grad_state)

        gq = do @ states.mT
        if da is not None:
            da += sum_from(sum_channels(q * gq, da))
        dq += chunks.a.weigh_entering(gq)
        if grads.q is not None:
            store(grads.q, segment, dq * p.scale)
        if dc is not None:
            dc += sum_from(do * (q @ states))
        backward_from_states(chunks, states, grad_states, (dk, dv), (da, dc), grads)
    if grads.initial_state is not None:
        grads.initial_state.copy_(grad_state)


def backward_from_states(
    chunks: Chunks,
    states: Tensor,
    grad_states: Tensor,
    inputs: tuple[Tensor, Tensor],
    decays: tuple[Tensor | None, Tensor | None],
    grads: Gradients,
) -> None:
    """Complete the gradients of (k, v) and of the decays (a, c) by what flows back from later chunks, and store them.

    ``states`` enter the chunks, ``grad_states`` belong to the states that leave them, ``[B, H, chunks, D, E]``.
    """
    (dk, dv), (da, dc) = inputs, decays
    gk, gv = chunks.v @ grad_states.mT, chunks.k @ grad_states
    if da is not None and grads.log_decay is not None:
        da += sum_before(sum_channels(chunks.k * gk, da))
        add_crossing(chunks, states, grad_states, da, -1)
        add_decay_gradient(grads.log_decay, chunks.segment, da)
    if dc is not None and grads.log_decay_v is not None:
        dc += sum_before(chunks.v * gv)
        add_crossing(chunks, states, grad_states, dc, -2)
        add_decay_gradient(grads.log_decay_v, chunks.segment, dc)
    dk += chunks.a.weigh_leaving(gk)
    dv += chunks.c.weigh_leaving(gv)
    if grads.k is not None:
        store(grads.k, chunks.segment, dk)
    if grads.v is not None:
        store(grads.v, chunks.segment, dv)


def add_crossing(chunks: Chunks, states: Tensor, grad_states: Tensor, gradient: Tensor, dim: int) -> None:
    """What crosses a whole chunk counts for the decay of each of its tokens."""
    for i in range(chunks.segment.chunks):
        crossing = (chunks.decayed(states[:, :, i], i) * grad_states[:, :, i]).sum(dim)
        gradient[:, :, i] += sum_channels(crossing, gradient)[..., None, :]


def states_forward(p: States, states: Tensor) -> None:
    loader = Loader(p)
    first = 0
    state = new_state(p.initial_state, states[:, :, 0].shape, p.k)
    for segment in partition(p, p.chunk_size, FORWARD_SEGMENTS[p.schedule]):
        chunks = loader.chunks(segment).leave()
        contributions = chunks.contributions()
        state = chunks.scan_states(contributions, state)
        states[:, :, first : first + segment.chunks] = contributions
        first += segment.chunks
    states[:, :, first] = state


def states_backward(p: States, states: Tensor, grad_states: Tensor, grads: Gradients) -> None:
    loader = Loader(p)
    last = states.shape[2] - 1
    grad_state = grad_states[:, :, last]
    for segment in reversed(partition(p, p.chunk_size, BACKWARD_SEGMENTS[p.schedule])):
        chunks = loader.chunks(segment).leave()
        of_segment = slice(last - segment.chunks, last)
        last -= segment.chunks
        leaving = grad_states[:, :, of_segment].clone()
        grad_state = chunks.scan_gradients(leaving, grad_state)
        nothing_inside = chunks.k.new_zeros(chunks.k.shape), chunks.v.new_zeros(chunks.v.shape)
        decays = decay_accumulators(chunks, grads)
        backward_from_states(chunks, states[:, :, of_segment], leaving, nothing_inside, decays, grads)
    if grads.initial_state is not None:
        grads.initial_state.copy_(grad_state)


def decay_accumulators(chunks: Chunks, grads: Gradients) -> tuple[Tensor | None, Tensor | None]:
    """Zeros ``[B, H, chunks, tokens, channels]`` for the decays whose gradient is requested."""
    da = dc = None
    if grads.log_decay is not None:
        by_channel = DecayForm.of(grads.log_decay).by_channel
        da = chunks.k.new_zeros(*chunks.k.shape[:4], chunks.k.shape[4] if by_channel else 1)
    if grads.log_decay_v is not None:
        dc = chunks.v.new_zeros(chunks.v.shape)
    return da, dc


def chunk_size(p: Attention) -> int:
    return 1 if p.schedule == "recurrent" else CHUNK
