"""The ``torch.library`` behind ``torch.ops.fulmen``: how an operator is defined, and how it gets its gradient.

Ops are defined on a ``torch.library.Library``, whose calls cost a third of those of ``torch.library.custom_op``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import _C, Tensor

# torch has no public function for one level of torch.func, and its stubs leave these out. torch.library's own gradients
# are made of the same pieces.
from torch._functorch.autograd_function import enable_single_level_autograd_function  # type: ignore[attr-defined]
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from fulmen.checks import refuse_tangents
from fulmen.tensors import autocast_enabled

_library = torch.library.Library("fulmen", "DEF")
implementations: dict[str, Callable[..., Any]] = {}  # by the op's name; their last argument is the backend


def imported_when_used(modules: dict[str, str]) -> Callable[[str], Any]:
    """A function that gives the module of a backend, which it imports when it is asked for the first time."""
    return cache(lambda backend: import_module(modules[backend]))


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any], tensor: int = 0) -> None:
    """Register an op; its argument number ``tensor`` is a tensor in every call."""
    name = schema.partition("(")[0]
    implementations[name] = run

    def run_without_autocast(*args: Any) -> Any:
        # Autocast would reach the torch operations inside a backend and round what is computed in float32.
        if not autocast_enabled(args[tensor]):
            return run(*args)
        with torch.autocast(args[tensor].device.type, enabled=False):
            return run(*args)

    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run_without_autocast, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fulmen::{name}", fake, lib=_library)


def define_gradient(name: str, backward: Callable[..., Any], keep: Callable[..., None]) -> None:
    """What torch.library.register_autograd does, for torch.func (grad, vjp, jacrev) too.

    The kernel of the Autograd key runs once for each level of torch.func, with the tensors of that level: a function
    for a single level is all that it takes. The ordinary torch.autograd.Function would look for the levels itself.
    """
    op = getattr(torch.ops.fulmen, name).default

    def below(keyset: _C.DispatchKeySet, *args: Any) -> Any:
        with _C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & _C._after_autograd_keyset, *args)

    class Gradient(_SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            *inputs, keyset = args
            # Off inside of a function, but the levels below may be differentiated too.
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                output = below(keyset, *inputs)
            keep(ctx, tuple(inputs), output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            return *backward(ctx, *grads), None  # for the keyset

    def run(keyset: _C.DispatchKeySet, *args: Any) -> Any:
        if forward_ad._current_level >= 0:
            refuse_tangents(args)
        if torch.is_grad_enabled() and _C._any_requires_grad(*args):
            with enable_single_level_autograd_function():
                return Gradient.apply(*args, keyset)  # type: ignore[attr-defined]  # its stub has no apply
        return below(keyset, *args)

    _library.impl(name, run, "Autograd", with_keyset=True)


def forbid_double_backward(operator: str) -> None:
    """The op ``{operator}_backward`` says so when somebody differentiates it."""

    def refuse(ctx: Any, *grads: Tensor | None) -> None:
        raise RuntimeError(f"fulmen has no double backward: the gradient of {operator} cannot be differentiated again")

    def keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    define_gradient(f"{operator}_backward", refuse, keep_nothing)
