"""Counting what torch operations allocate, on real or fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fulmen.runtime.torch_private import dispatch_mode, key_of_storage, leaves_of


class Memory(dispatch_mode()):  # type: ignore[misc]  # a class that mypy cannot see
    """Counts the bytes of the storages that operations make, while these are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in leaves_of(result):
            if isinstance(x, torch.Tensor) and key_of_storage(x.untyped_storage()) not in self._alive:
                self._count(x.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = key_of_storage(storage), storage.nbytes()
        self._alive.add(key)
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.allocated -= size

    @contextmanager
    def workspace(self) -> Iterator[list[int]]:
        """Gives a list that will hold one number: the most that was allocated at once in the block."""
        found: list[int] = []
        before = self.peak = self.allocated
        yield found
        found.append(self.peak - before)
