"""The ``torch.library`` of ``torch.ops.fulmen``: how an operator is defined, and how it gets its gradient.

Ops are defined on a ``torch.library.Library``, whose calls cost a third of those of ``torch.library.custom_op``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fulmen.runtime.tensors import autocast_enabled
from fulmen.runtime.torch_private import differentiable, not_differentiable

_library = torch.library.Library("fulmen", "DEF")
implementations: dict[str, Callable[..., Any]] = {}  # by the op's name; their last argument is the backend


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


def define_gradient(name: str, backward: Callable[..., Any], keep: Callable[..., None]) -> Callable[..., Any]:
    """The op as a function that autograd and torch.func (grad, vjp, jacrev) differentiate."""
    return differentiable(_library, name, backward, keep)


def without_gradient(name: str, operator: str) -> Callable[..., Any]:
    """The op as a function that says so when somebody differentiates it; it is the gradient of ``operator``."""
    why = f"fulmen has no double backward: the gradient of {operator} cannot be differentiated again"
    return not_differentiable(_library, name, why)
