"""The chunked form in torch matmuls: portable to every device torch has.

In a chunk, S the state that enters and w the decays of :mod:`fulmen.ops.delta_rule.gates`,

    L = pairs(k, k) below the diagonal          M = pairs(scale q, k)          X = (I + L diag(β))⁻¹
    Y = X (V - later(k) S)                      U = β Y
    O = later(scale q) S + M U                  S_out = decayed(S) + earlier(k)ᵀ U

so a chunk's corrections are one triangular solve, which does not wait for the state. With R = X later(k),

    Y = X V - R S                               O = (later(scale q) - M β R) S + M β X V

In the first, X would magnify the rounding of later(k) S. The second says how the output depends on S: of later(scale q)
alone, later(k)ᵀ dV would take most away again. The gradient is that of linear attention with two reads for each token,
of q and of k; docs/delta_rule.md derives it. A sequence is walked in segments of chunks: what does not depend on the
state is computed for a whole segment at once. The backward keeps one state for each segment and recomputes the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.ops.chunks.segments import (
    BACKWARD_SEGMENTS,
    CHUNK,
    FORWARD_SEGMENTS,
    Loader,
    Segment,
    add_decay_gradient,
    partition,
    store,
)
from fulmen.ops.chunks.sequences import new_state
from fulmen.ops.chunks.weights import sum_before, sum_channels, sum_from
from fulmen.ops.delta_rule import reference
from fulmen.ops.delta_rule.gates import ChannelGate, ScalarGate
from fulmen.ops.delta_rule.problem import DeltaRule, Gradients, normalized, normalized_backward

SHORT_CHUNK = 16  # where the inverse has no wider dtype than the call: of 64 keys that are alike it costs a digit more

step = reference.step  # one token has nothing to chunk


def forward(p: DeltaRule, output: Tensor, state: Tensor | None) -> None:
    for part, tokens, row in p.sequences():
        final = forward_sequence(part, output[:, tokens])
        if state is not None:
            state[row] = final


def forward_sequence(p: DeltaRule, output: Tensor) -> Tensor:
    """Write the output of one sequence (or a batch of equal length) and return its final state."""
    loader = Loader(p)
    state = new_state(p.initial_state, p.state_shape, p.k)
    for segment in partition(p, chunk_size(p), FORWARD_SEGMENTS[p.schedule]):
        chunks = Chunks(p, loader, segment)
        states, errors, state = chunks.walk(state)
        store(output, segment, chunks.gate.later(chunks.q) @ states + chunks.scores @ (chunks.beta * errors))
    return state


def backward(p: DeltaRule, grad_output: Tensor | None, grad_state: Tensor | None, grads: Gradients) -> None:
    for part, tokens, row in p.sequences():
        do = p.v.new_zeros(()).expand(part.output_shape) if grad_output is None else grad_output[:, tokens]
        backward_sequence(part, do, None if grad_state is None else grad_state[row], grads.select(tokens, row))


def backward_sequence(p: DeltaRule, grad_output: Tensor, grad_state: Tensor | None, grads: Gradients) -> None:
    loader = Loader(p)
    segments = partition(p, chunk_size(p), BACKWARD_SEGMENTS[p.schedule])
    entering = [new_state(p.initial_state, p.state_shape, p.k)]
    for segment in segments[:-1]:
        entering.append(Chunks(p, loader, segment).walk(entering[-1])[2])
    grad_state = new_state(grad_state, p.state_shape, p.k)
    for segment in reversed(segments):
        chunks = Chunks(p, loader, segment)
        grad_state = chunks.backward(entering.pop(), loader.load(grad_output, segment), grad_state, grads)
    if grads.initial_state is not None:
        grads.initial_state.copy_(grad_state)


class Chunks:
    """One segment of a call, with all that does not depend on its states. ``q`` holds the scale.

    Tensors are ``[B, H, chunks, tokens, size]``. Tokens that fill up a chunk have β = 0 and do not decay.
    """

    def __init__(self, p: DeltaRule, loader: Loader, segment: Segment) -> None:
        self.p, self.segment = p, segment
        self.q, self.k, self.v = (loader.load(x, segment) for x in (p.q, p.k, p.v))
        self.beta = loader.load(p.beta[..., None], segment)
        if p.normalize_qk:
            self.q, self.q_reciprocal = normalized(self.q)
            self.k, self.k_reciprocal = normalized(self.k)
        self.unit_q, self.q = self.q, self.q * p.scale
        gate = ScalarGate if loader.scalar else ChannelGate
        self.gate = gate(loader.decay(segment), segment.padded)
        self.scores = self.gate.pairs(self.q, self.k)
        k = self.k.to(wide(self.k))
        overlaps = self.gate.pairs(k, k).tril(-1)
        self.overlaps, self.inverse = overlaps.to(self.k.dtype), inverse(overlaps * self.beta.mT)
        self.earlier_k = self.gate.earlier(self.k)
        self.reads = wide_product(self.inverse, self.gate.later(self.k))

    def walk(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The state that enters each chunk ``[B, H, chunks, D, E]``, Y, and the state that leaves the segment."""
        states = state.new_empty(*self.k.shape[:3], *state.shape[2:])
        errors = wide_product(self.inverse, self.v)
        for i in range(self.segment.chunks):
            states[:, :, i] = state
            y = errors[:, :, i]
            y -= self.reads[:, :, i] @ state
            state = self.gate.decayed(state, i) + self.earlier_k[:, :, i].mT @ (self.beta[:, :, i] * y)
        return states, errors, state

    def backward(self, state: Tensor, do: Tensor, grad_state: Tensor, grads: Gradients) -> Tensor:
        """Store the gradients of the segment's tokens. ``state`` enters the segment; ``grad_state`` is the gradient of
        the state that leaves it. Returns that of the one that enters."""
        q, k, gate = self.q, self.k, self.gate
        states, errors, _ = self.walk(state)
        grad_written = self.scores.mT @ do
        grad_states = torch.empty_like(states)
        corrected = self.beta * self.reads
        direct = (gate.later(q) - wide_product(self.scores.to(wide(q)), corrected)).mT @ do
        dv = torch.empty_like(self.v)
        for i in reversed(range(self.segment.chunks)):
            grad_states[:, :, i] = grad_state
            du, of_state = grad_written[:, :, i], self.earlier_k[:, :, i] @ grad_state
            du += of_state
            dv[:, :, i] = wide_product(self.inverse[:, :, i].mT, self.beta[:, :, i] * du)
            grad_state = gate.decayed(grad_state, i) + direct[:, :, i] - corrected[:, :, i].mT @ of_state

        def of_pairs(errors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Gradients of the pairs of a chunk: by way of the overlaps, and of the products with q and with k."""
            of_errors = errors.mT
            overlaps = (dv.to(errors.dtype) @ of_errors).tril(-1)
            return overlaps, (do.to(errors.dtype) @ of_errors).tril() * self.beta.mT, overlaps * -self.beta.mT

        through_overlaps, by_q, by_k = of_pairs(errors)
        dbeta = (grad_written * errors).sum(-1) - (self.overlaps * through_overlaps).sum(-2)
        q_in, k_in = gate.later(do @ states.mT), gate.later(dv @ states.mT).neg_()
        k_out = gate.earlier((self.beta * errors) @ grad_states.mT)
        if grads.log_decay is not None:
            # What a decay gets from pairs by way of q takes most of what it gets by way of k away.
            _, wide_by_q, wide_by_k = of_pairs(errors.to(wide(k)))
            da = self.inside(wide_by_q, q) + self.inside(wide_by_k, k)
            da += sum_from(sum_channels(q * q_in + k * k_in, da)) + sum_before(sum_channels(k * k_out, da))
            for i in range(self.segment.chunks):
                crossing = (gate.decayed(states[:, :, i], i) * grad_states[:, :, i]).sum(-1)
                da[:, :, i] += sum_channels(crossing, da)[..., None, :]
            add_decay_gradient(grads.log_decay, self.segment, da)
        dq = (q_in + gate.to_later(by_q, k)) * self.p.scale
        dk = k_in + gate.to_later(by_k, k) + k_out + gate.to_earlier(by_q, q) + gate.to_earlier(by_k, k)
        if self.p.normalize_qk:
            dq = normalized_backward(dq, self.unit_q, self.q_reciprocal)
            dk = normalized_backward(dk, k, self.k_reciprocal)
        for into, gradient in ((grads.q, dq), (grads.k, dk), (grads.v, dv)):
            if into is not None:
                store(into, self.segment, gradient)
        if grads.beta is not None:
            store(grads.beta[..., None], self.segment, dbeta[..., None])
        return grad_state

    def inside(self, matrix: Tensor, later: Tensor) -> Tensor:
        """What a decay gets from the pairs of its chunk: sums of many terms, which cancel."""
        dtype = wide(self.k)
        return self.gate.inside(matrix.to(dtype), later.to(dtype), self.k.to(dtype)).to(self.k.dtype)


def inverse(triangle: Tensor) -> Tensor:
    """(I + triangle)⁻¹ of what lies below the diagonal."""
    one = torch.eye(triangle.shape[-1], dtype=triangle.dtype, device=triangle.device)
    return torch.linalg.solve_triangular(triangle + one, one, upper=False, unitriangular=True)


def wide(x: Tensor) -> torch.dtype:
    """Of a chunk's inverse, the overlaps that it is of, and products with it: float64 where a device has it. It
    magnifies what is off in them: in float32, 64 keys that are nearly parallel leave three digits with β near 2, and
    keys that repeat four."""
    return x.dtype if x.device.type == "mps" else torch.float64


def wide_product(inverse: Tensor, x: Tensor) -> Tensor:
    return (inverse @ x.to(inverse.dtype)).to(x.dtype)


def chunk_size(p: DeltaRule) -> int:
    if p.schedule == "recurrent":
        return 1
    return CHUNK if p.k.dtype.itemsize < wide(p.k).itemsize else SHORT_CHUNK
