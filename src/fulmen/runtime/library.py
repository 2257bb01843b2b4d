"""The ``torch.library`` of ``torch.ops.fulmen``: how an operator is defined, and how it gets its gradient.

Ops are defined on a ``torch.library.Library``, whose calls cost a third of those of ``torch.library.custom_op``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fulmen.runtime.batching import batching_rule
from fulmen.runtime.tensors import autocast_enabled
from fulmen.runtime.torch_private import differentiable, not_differentiable, only_the_kernel_runs

_library = torch.library.Library("fulmen", "DEF")
implementations: dict[str, Callable[..., Any]] = {}  # by the op's name; their last argument is the backend


def define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    tensor: int = 0,
    shared: Mapping[str, int] | None = None,
    gradients: Sequence[str] = (),
) -> Callable[..., Any]:
    """Register an op, and return it as a function.

    Its argument number ``tensor`` is a tensor in every call; ``shared`` and ``gradients`` are for
    :func:`fulmen.runtime.batching.batching_rule`.
    """
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
    op = getattr(torch.ops.fulmen, name).default
    torch.library.register_vmap(f"fulmen::{name}", batching_rule(op, shared or {}, gradients), lib=_library)
    return _called(name, op)


def _called(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
    """``op``, whose implementation is run at once where the dispatcher would do nothing else: it takes several times as
    long as a small call's work, most of it for kernels that are written in Python."""
    run = implementations[name]

    def call(*args: Any) -> Any:
        if not torch.compiler.is_compiling() and only_the_kernel_runs(args):
            return run(*args)
        return op(*args)

    return call


def define_gradient(name: str, backward: Callable[..., Any], keep: Callable[..., None]) -> Callable[..., Any]:
    """The op as a function that autograd and torch.func (grad, vjp, jacrev) differentiate."""
    return _called(name, differentiable(_library, name, backward, keep))


def without_gradient(name: str, operator: str) -> Callable[..., Any]:
    """The op as a function that says so when somebody differentiates it; it is the gradient of ``operator``."""
    why = f"fulmen has no double backward: the gradient of {operator} cannot be differentiated again"
    return _called(name, not_differentiable(_library, name, why))
