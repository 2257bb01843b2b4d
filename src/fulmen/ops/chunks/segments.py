"""Partitioning sequences into segments of chunks, loading a segment, and scanning the states through its chunks.

Loaded tensors are head-major, ``[B, H, chunks, tokens, size]``, in the state's dtype, with shared heads repeated.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from torch import Tensor

from fulmen.ops.chunks.decay_form import DecayForm, Decays
from fulmen.ops.chunks.weights import Decay, pair_weights
from fulmen.runtime.tensors import state_dtype

# How large one tensor of a "cached" segment may be. On a CPU the dozen tensors of a segment should stay in the
# last-level cache; an accelerator wants enough work in each launch.
SEGMENT_BYTES = {"cpu": 4 << 20}
SEGMENT_BYTES_ELSEWHERE = 128 << 20
CHUNK = 64
# How many chunks a segment has ("together" of partition), by the call's schedule.
FORWARD_SEGMENTS = {"auto": "cached", "recurrent": "one", "loop": "one", "parallel": "all", "recompute": "all"}
BACKWARD_SEGMENTS = FORWARD_SEGMENTS | {"recurrent": "cached", "loop": "cached", "recompute": "cached"}


class Call(Protocol):
    """What partitioning and loading need of an operator's call."""

    @property
    def k(self) -> Tensor: ...  # [B, N, Hk, D]
    @property
    def v(self) -> Tensor: ...  # [B, N, Hv, E]
    @property
    def log_decay(self) -> Tensor | None: ...
    @property
    def log_decay_v(self) -> Tensor | None: ...
    @property
    def heads(self) -> int: ...
    @property
    def decays(self) -> Decays: ...


class Segment(NamedTuple):
    """``chunks`` chunks of ``size`` tokens each, from token ``start``."""

    start: int
    chunks: int
    size: int

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.start + self.chunks * self.size)

    @property
    def padded(self) -> int:
        """The tokens a chunk is filled up to: weights are built by doubling, so a power of two."""
        return 1 << (self.size - 1).bit_length()


def partition(p: Call, chunk: int, together: str) -> list[Segment]:
    """The sequence as segments of full chunks, and one more segment for the tokens left over.

    ``together`` says how many chunks a segment has: "one", "all", or as many as stay "cached".
    """
    batch, length, _, key_size = p.k.shape
    value_size = p.v.shape[3]
    full = length // chunk
    if together == "cached":
        largest = batch * p.heads * max(chunk * key_size, chunk * value_size, key_size * value_size)
        budget = SEGMENT_BYTES.get(p.k.device.type, SEGMENT_BYTES_ELSEWHERE)
        per_segment = max(budget // max(largest * state_dtype(p.k.dtype).itemsize, 1), 1)
    else:
        per_segment = max(full, 1) if together == "all" else 1
    segments = [Segment(i * chunk, min(per_segment, full - i), chunk) for i in range(0, full, per_segment)]
    return [*segments, Segment(full * chunk, 1, length % chunk)] if length % chunk else segments


class Chunks:
    """One segment of a call: its keys, values and decays, with what its chunks do to the state.

    The decays start as blocks of one token; what happens inside the chunks is computed first and merges them on the
    way. :meth:`leave` then turns to the states: from there on, k and v are weighed to the end of their chunk.
    """

    def __init__(self, segment: Segment, k: Tensor, v: Tensor, a: Decay, c: Decay) -> None:
        self.segment = segment
        self.k, self.v = k, v
        self.a, self.c = a, c

    def leave(self) -> Chunks:
        self.a.merge(self.segment.padded)
        self.c.merge(self.segment.padded)
        self.k, self.v = self.a.weigh_leaving(self.k), self.c.weigh_leaving(self.v)
        return self

    def contributions(self) -> Tensor:
        """What each chunk adds to the state, ``[B, H, chunks, D, E]``."""
        return self.k.mT @ self.v

    def scan_states(self, contributions: Tensor, state: Tensor) -> Tensor:
        """Turn the chunks' contributions into the states that enter them, in place; return the state that leaves."""
        return self._scan(contributions, state, range(self.segment.chunks))

    def scan_gradients(self, contributions: Tensor, grad_state: Tensor) -> Tensor:
        """From the last chunk to the first, turn what each adds to the gradient of the state that enters it into the
        gradient of the state that leaves it, in place; return the gradient of the state that enters the segment."""
        return self._scan(contributions, grad_state, reversed(range(self.segment.chunks)))

    def decayed(self, state: Tensor, chunk: int) -> Tensor:
        """``state`` ``[B, H, D, E]`` after the decay of all tokens of a chunk."""
        a, c = self.a.total(chunk), self.c.total(chunk)
        state = state if a is None else state * a[..., :, None]
        return state if c is None else state * c[..., None, :]

    def _scan(self, contributions: Tensor, state: Tensor, order: Iterable[int]) -> Tensor:
        for chunk in order:
            contribution = contributions[:, :, chunk]
            after = self.decayed(state, chunk) + contribution
            contribution.copy_(state)
            state = after
        return state


class Loader:
    """Loads the tensors of a call, segment by segment."""

    def __init__(self, p: Call) -> None:
        self.p = p
        self.heads = p.heads
        self.dtype = state_dtype(p.k.dtype)
        # Without a decay per channel, one matrix of weights serves all channels.
        self.scalar = p.decays.channel_axes == 0
        self._same_for_all: tuple[int, Decay, Tensor | None] | None = None

    def load(self, x: Tensor, segment: Segment) -> Tensor:
        """The segment's tokens of ``[B, N, heads, size]``; an incomplete chunk is filled up with zeros."""
        x = x[:, segment.tokens].unflatten(1, (segment.chunks, segment.size)).permute(0, 3, 1, 2, 4)
        batch, heads, chunks, tokens, size = x.shape
        shape = (batch, self.heads, chunks, segment.padded, size)
        allocate = x.new_empty if tokens == segment.padded else x.new_zeros
        loaded = allocate(shape, dtype=self.dtype)
        loaded.unflatten(1, (heads, -1))[..., :tokens, :] = x[:, :, None]
        return loaded

    def decay(self, segment: Segment) -> Decay:
        """Of the key axis."""
        return Decay(self._logs(self.p.log_decay, segment))

    def chunks(self, segment: Segment) -> Chunks:
        a, c = (Decay(self._logs(x, segment)) for x in (self.p.log_decay, self.p.log_decay_v))
        return Chunks(segment, self.load(self.p.k, segment), self.load(self.p.v, segment), a, c)

    def chunks_and_pair_weights(self, segment: Segment) -> tuple[Chunks, Tensor | None]:
        """A segment with merged decays, and the weights of all pairs of a chunk's tokens (for a ``scalar`` decay).

        Weights of a decay that is the same for all tokens are computed once for all segments with chunks of one size.
        """
        log_decay = self.p.log_decay
        if self.p.decays.key.has_tokens:
            a = Decay(self._logs(log_decay, segment))
            pairs = pair_weights(a)
        else:
            if self._same_for_all is None or self._same_for_all[0] != segment.size:
                a = Decay(self._logs(log_decay, segment))
                self._same_for_all = segment.size, a, pair_weights(a)
            _, a, pairs = self._same_for_all
        return Chunks(segment, self.load(self.p.k, segment), self.load(self.p.v, segment), a, Decay(None)), pairs

    def _logs(self, log_decay: Tensor | None, segment: Segment) -> Tensor | None:
        """The log-decay of each token; one that fills up a chunk does not decay."""
        if log_decay is None:
            return None
        form = DecayForm.of(log_decay)
        if not form.has_tokens:
            logs = log_decay.new_zeros(1, self.heads, 1, segment.padded, 1, dtype=self.dtype)
            logs[..., : segment.size, :] = log_decay[:, None, None, None]
            return logs
        return self.load(log_decay if form.by_channel else log_decay[..., None], segment)


def store(into: Tensor, segment: Segment, x: Tensor) -> None:
    """Write head-major ``x`` to the segment's tokens of ``[B, N, heads, size]``, adding up the heads that share one."""
    x = x[..., : segment.size, :].permute(0, 2, 3, 1, 4)
    if x.shape[3] != into.shape[2]:
        x = x.unflatten(3, (into.shape[2], -1)).sum(4)
    into[:, segment.tokens].unflatten(1, (segment.chunks, segment.size)).copy_(x)


def add_decay_gradient(into: Tensor, segment: Segment, x: Tensor) -> None:
    """Add head-major ``x`` ``[B, H, chunks, tokens, D or 1]`` to the gradient of a log-decay of any form."""
    form = DecayForm.of(into)
    if not form.has_tokens:
        into += x[..., : segment.size, :].sum((0, 2, 3, 4))
    else:
        store(into if form.by_channel else into[..., None], segment, x)
