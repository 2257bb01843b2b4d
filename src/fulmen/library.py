"""The ``torch.library`` behind ``torch.ops.fulmen``: how an operator is defined, and how it gets its gradient.

Ops are defined on a ``torch.library.Library``, whose calls cost a third of those of ``torch.library.custom_op``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fulmen.tensors import autocast_enabled

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


def define_gradient(name: str, backward: Callable[..., Any], keep: Callable[..., None]) -> None:
    torch.library.register_autograd(f"fulmen::{name}", backward, setup_context=keep, lib=_library)


def forbid_double_backward(operator: str) -> None:
    """The op ``{operator}_backward`` says so when somebody differentiates it."""

    def refuse(ctx: Any, *grads: Tensor | None) -> None:
        raise RuntimeError(f"fulmen has no double backward: the gradient of {operator} cannot be differentiated again")

    def keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    define_gradient(f"{operator}_backward", refuse, keep_nothing)
