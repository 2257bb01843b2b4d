"""What the layers of a model remember of the tokens so far."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import fulmen
from fulmen.runtime.checks import check_count, check_rows

Rows = Tensor | list[int] | slice


class LayerCache:
    """What one layer remembers, a row for each sequence. Empty until the layer has been called with it.

    ``states`` are tensors ``[rows, ...]`` by name, whose sizes do not depend on how many tokens there were: that of the
    recurrence ``[rows, H, D, E]``, and of each convolution ``[rows, C, K - 1]``. ``factors`` is what tensor-product
    attention has in their place; it grows with the tokens.
    """

    def __init__(self) -> None:
        self.states: dict[str, Tensor] = {}
        self.factors: fulmen.TPACache | None = None

    @property
    def rows(self) -> int | None:
        """How many sequences there are. None: it is empty."""
        if self.factors is not None:
            return self.factors.rows
        for state in self.states.values():
            return state.shape[0]
        return None

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.states.values()) + (0 if self.factors is None else self.factors.nbytes)

    def select(self, rows: Rows) -> LayerCache:
        """As :meth:`StateCache.select`."""
        check_rows(rows, self.rows)
        chosen = LayerCache()
        chosen.states = {name: state[rows].clone() for name, state in self.states.items()}
        chosen.factors = None if self.factors is None else self.factors.select(rows)
        return chosen

    def join(self, other: LayerCache) -> LayerCache:
        """As :meth:`StateCache.join`."""
        if self.rows is None or other.rows is None:
            return (other if self.rows is None else self).select(slice(None))
        self._check_like(other)
        joined = LayerCache()
        joined.states = {name: torch.cat((x, other.states[name].to(x.dtype))) for name, x in self.states.items()}
        if self.factors is not None and other.factors is not None:
            joined.factors = self.factors.join(other.factors)
        return joined

    def place(self, rows: Tensor | list[int], other: LayerCache) -> None:
        """As :meth:`StateCache.place`."""
        self._check_like(other)
        check_rows(rows, self.rows)
        for name, state in self.states.items():
            state[rows] = other.states[name].to(state.dtype)
        if self.factors is not None and other.factors is not None:
            self.factors.place(rows, other.factors)

    def _check_like(self, other: LayerCache) -> None:
        def sizes(cache: LayerCache) -> tuple[object, ...]:
            return {name: x.shape[1:] for name, x in cache.states.items()}, cache.factors is None

        if sizes(other) != sizes(self):
            raise ValueError(f"other must be of the same layer, {self}; got {other}")

    def __repr__(self) -> str:
        parts = [f"{name} {list(x.shape)} {str(x.dtype)[6:]}" for name, x in self.states.items()]
        parts += [] if self.factors is None else [repr(self.factors)]
        return f"LayerCache({', '.join(parts) or 'empty'})"


class StateCache:
    """What a model remembers: an entry for each of its layers, which the layer is called with::

        cache = StateCache(len(layers))
        for layer, entry in zip(layers, cache):
            x = layer(x, cache=entry)

    A row is a sequence. A decoded token updates states where they are; :meth:`select` and :meth:`join`, for requests
    that leave and come, give a cache with memory of its own.

    Args:
        layers: how many.
    """

    def __init__(self, layers: int) -> None:
        check_count("layers", layers)
        self._layers = [LayerCache() for _ in range(layers)]

    @property
    def rows(self) -> int | None:
        """How many sequences there are. None: it is empty."""
        return next((entry.rows for entry in self if entry.rows is not None), None)

    @property
    def nbytes(self) -> int:
        """Of all states."""
        return sum(entry.nbytes for entry in self)

    def select(self, rows: Rows) -> StateCache:
        """The sequences at these rows, in this order; a row may be taken more than once, as in a beam search.

        Args:
            rows: indices ``[n]``, or a slice.
        """
        return self._of([entry.select(rows) for entry in self])

    def join(self, other: StateCache) -> StateCache:
        """The sequences of this cache, then those of ``other``; either may be empty."""
        self._check_like(other)
        return self._of([mine.join(theirs) for mine, theirs in zip(self, other, strict=True)])

    def place(self, rows: Tensor | list[int], other: StateCache) -> None:
        """Put the sequences of ``other`` into these rows of this cache, in place of those that are there.

        Args:
            rows: ``[other.rows]``, indices.
        """
        self._check_like(other)
        for mine, theirs in zip(self, other, strict=True):
            mine.place(rows, theirs)

    @staticmethod
    def _of(entries: list[LayerCache]) -> StateCache:
        cache = StateCache(len(entries))
        cache._layers = entries
        return cache

    def _check_like(self, other: StateCache) -> None:
        if not isinstance(other, StateCache):
            raise TypeError(f"other must be a StateCache; got {type(other).__name__}")
        if len(other) != len(self):
            raise ValueError(f"other must have the {len(self)} layers of this cache; got {len(other)}")

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, layer: int) -> LayerCache:
        return self._layers[layer]

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self._layers)

    def __repr__(self) -> str:
        size = f"{self.nbytes / 2**20:.2f} MiB" if self.nbytes >= 2**20 else f"{self.nbytes / 2**10:.1f} KiB"
        lines = [f"StateCache: {len(self)} layers, {self.rows or 0} rows, {size}"]
        return "\n  ".join([*lines, *(f"{i}: {entry!r}" for i, entry in enumerate(self))])
