"""``patch(model)``: the modules of one model compute with Fulmen's operators, until it is undone."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fulmen.integrations.transformers import rebinding
from fulmen.integrations.transformers.functions import (
    KEEPS_A_STATE,
    OUR_FORWARDS,
    OURS,
    same_arguments,
    why_left_alone,
)
from fulmen.integrations.transformers.handing_on import HANDING_ON, REFUSING, refusing
from fulmen.integrations.transformers.last_sequence import goes_on
from fulmen.integrations.transformers.stepping_aside import or_original
from fulmen.nn.linear import FEW_ROWS, SLOW, linear

# The handle that undoes a module. A copy of a patched module computes as the original does, and has none.
_owners: WeakKeyDictionary[nn.Module, Patch] = WeakKeyDictionary()


def patch(model: nn.Module) -> Patch:
    """Has the mixers of a transformers model, and its norms, compute with Fulmen's operators; and its linear layers,
    where torch is slow at these (:mod:`fulmen.nn.linear`).

    Only this model changes; its weights, its caches and what it computes do not. Where Fulmen does not take an
    argument, transformers' own function serves and a warning says so once. Printing the result says what was patched,
    what was left alone and why.

    Args:
        model: a model of transformers, or any part of one.

    Returns:
        A handle whose ``undo()`` gives the model its own functions back; also a context manager that does so at its
        end. Modules that another handle patched before stay with that handle.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    return Patch(model)


class Patch:
    """What :func:`patch` did to a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = type(model).__name__
        self._modules: list[nn.Module] = []
        self._patched: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._before: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._left_alone: Counter[tuple[str, str]] = Counter()
        for module in model.modules():
            self._take(module)

    def _take(self, module: nn.Module) -> None:
        cls: Any = type(module)
        name = cls.__name__
        if cls is not nn.Linear and not cls.__module__.startswith("transformers.models."):
            return
        what = rebinding.found(module)
        if what is not None and module in _owners:
            self._before[name, what] += 1
            return
        forward, brought, reasons = _our_forward(cls)
        if forward is not None and what is None and not rebinding.is_as_its_class(module):
            forward, reasons = None, ("it has a forward of its own",)
        self._left_alone.update((name, reason) for reason in reasons)
        if forward is not None:
            rebinding.put(module, forward, brought)
            _owners[module] = self
            self._modules.append(module)
            self._patched[name, brought] += 1

    def undo(self) -> None:
        """The model computes as before :func:`patch`. Undoing again does nothing."""
        for module in self._modules:
            if rebinding.found(module) is not None and _owners.pop(module, None) is self:
                rebinding.take_away(module)
        self._modules.clear()

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        state = "" if self._modules or not self._patched else ", undone"
        lines = [f"{count} x {name}: {', '.join(what)}" for (name, what), count in self._patched.items()]
        lines += [f"{count} x {name}: patched before" for (name, _), count in self._before.items()]
        lines += [f"{count} x {name}, left alone: {why}" for (name, why), count in self._left_alone.items()]
        return "\n  ".join([f"<Fulmen in {self._model}{state}>", *(lines or ["nothing that Fulmen computes"])])


def _linear(self: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002  # torch's own name for it
    return linear(input, self.weight, self.bias)


@functools.cache
def _our_forward(cls: Any) -> tuple[Callable[..., Any] | None, tuple[str, ...], tuple[str, ...]]:
    """For modules of a class: a forward of ours or None, what it brings, and what is left alone and why."""
    theirs: Any = cls.forward
    if cls is nn.Linear:
        of = {
            "products of 16 bits": SLOW - {torch.float32},
            "products of float32": SLOW & {torch.float32},
            "products of few rows": FEW_ROWS,
        }
        brought = tuple(products for products, dtypes in of.items() if dtypes)
        return (_linear, brought, ()) if brought else (None, (), ())
    if cls.__name__ in HANDING_ON:
        return HANDING_ON[cls.__name__](theirs), ("packed sequences",), ()
    if cls.__name__ in REFUSING:
        return refusing(theirs, REFUSING[cls.__name__]), ("packed sequences are refused",), ()
    if cls.__name__ in OUR_FORWARDS:
        ours = OUR_FORWARDS[cls.__name__]
        if not same_arguments(ours, theirs):
            return None, (), ("its forward takes other arguments than Fulmen knows",)
        return goes_on(or_original(ours, theirs, packs=True)), (ours.__name__,), ()

    functions: dict[str, Any] = {}
    left_alone: dict[str, list[str]] = {}
    for name, function in rebinding.called(theirs):
        if name in OURS and same_arguments(OURS[name], function):
            functions[name] = function
        elif why := why_left_alone(name, function):
            left_alone.setdefault(why, []).append(name)
    reasons = tuple(f"{', '.join(names)} ({why})" for why, names in left_alone.items())
    if not functions:
        unknown = not reasons and not KEEPS_A_STATE.isdisjoint(rebinding.attributes(theirs))
        return None, (), ("its forward keeps a state that Fulmen does not know",) if unknown else reasons
    # A mixer with a function that is not ours cannot keep packed sequences apart.
    packs = not left_alone
    replaced = {name: or_original(OURS[name], function, packs=packs) for name, function in functions.items()}
    return goes_on(rebinding.with_globals(theirs, replaced)), tuple(functions), reasons
