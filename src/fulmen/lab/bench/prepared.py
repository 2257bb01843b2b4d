"""Columns that get ready before they are timed."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Prepare = Callable[..., Callable[[], Tensor]]


class Prepared:
    """A function in two steps: ``prepare(*tensors)`` gives what is called, and measured, while these tensors come."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self._call: Callable[[], Tensor] | None = None
        self._tensors: tuple[Tensor, ...] = ()

    def __call__(self, *tensors: Tensor) -> Tensor:
        if self._call is None or any(x is not y for x, y in zip(tensors, self._tensors, strict=True)):
            self.release()
            self._call, self._tensors = self._prepare(*tensors), tensors
        return self._call()

    def release(self) -> None:
        """Let go of what was prepared, which may hold a whole model."""
        self._call, self._tensors = None, ()
