"""The gradients of an op, from what autograd requests to what it takes.

An op's inputs are a named tuple, its *call*; its gradients are another, whose fields are those of the call that can
have one. What nobody requests is None there, and an empty tensor where an op returns it: ops have no optional results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

Grads = TypeVar("Grads", bound=tuple[Tensor | None, ...])


def requested(kind: type[Grads], call: Any, needs_input_grad: tuple[bool, ...]) -> list[bool]:
    """Which fields of ``kind`` somebody requests. (The inputs of an op begin with those of its call.)"""
    needed = dict(zip(call._fields, needs_input_grad, strict=False))
    return [needed.get(name, False) for name in fields_of(kind)]


def allocated(kind: type[Grads], call: Any, wanted: Sequence[bool], new: Callable[[str, Tensor], Tensor]) -> Grads:
    """The requested gradients; ``new`` makes one from the name of its field and the input it belongs to."""
    fields = zip(fields_of(kind), wanted, strict=True)
    # A named tuple takes its fields one by one, which the bound of Grads, a tuple, does not say.
    return kind(*[new(name, getattr(call, name)) if wants else None for name, wants in fields])  # type: ignore[arg-type]


def returned(call: Any, grads: Any, like: Tensor) -> tuple[Tensor, ...]:
    """As an op returns them: each in the dtype of its input."""
    found = zip(fields_of(type(grads)), grads, strict=True)
    return tuple(like.new_empty(0) if x is None else x.to(getattr(call, name).dtype) for name, x in found)


def by_input(
    kind: type[Grads], call: Any, wanted: Sequence[bool], grads: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """What an op returned, as autograd takes it: for each field of the call its gradient, or None."""
    by_name = {name: x for name, x, wants in zip(fields_of(kind), grads, wanted, strict=True) if wants}
    return tuple(by_name.get(name) for name in call._fields)


def fields_of(kind: Any) -> tuple[str, ...]:
    return kind._fields
