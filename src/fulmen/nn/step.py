"""A decode step of a layer as one call of the CPU core.

A step of one sequence computes little: products with weights that come from memory, and between them functions of a few
hundred numbers. Called one by one from Python, each takes longer on the way there than it computes. So the first step
of a kind is traced, and where all that it does is something that the core does too (:mod:`fulmen.nn.traced`), the next
ones are one :class:`fulmen.runtime.program.Program` of the layer's parameters, of its states and of the token.

What a step does follows from its *signature*: the classes of the layer's modules, their sizes and options, and every
attribute of a tensor but its values, all looked at in each step. Where anybody else has a say in it (hooks, modules of
other classes, gradients, autocast, modes, profilers, subclasses of tensors, other devices) there is none, and the
modules are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from fulmen.nn.cache import LayerCache
from fulmen.nn.traced import MOST_ROWS, traced
from fulmen.runtime import core
from fulmen.runtime.program import Program
from fulmen.runtime.torch_private import any_hook_of_all_modules, are_plain, is_as_its_class, thread_is_plain

if TYPE_CHECKING:
    from fulmen.nn.mixer import Mixer

_MOST_REMEMBERED = 1024
_known: dict[object, Program | Literal[False]] = {}  # by signature; False: the modules each time
_options: dict[type, tuple[str, ...] | None] = {nn.Linear: (), nn.Sequential: ()}  # None: a class of somebody else


def step(mixer: Mixer, x: Tensor, cache: LayerCache, modules: Callable[[], Tensor]) -> Tensor:
    """``modules()``, or what gives the same."""
    if torch.is_grad_enabled() or not _is_token(x, cache) or core.core is None or not thread_is_plain():
        return modules()
    signature, tensors = _signature(mixer, x, cache)
    try:
        program = _known.get(signature) if signature else False
    except (TypeError, RuntimeError):  # something without a hash
        program = False
    if program is None:
        result, made = traced(modules, tensors)
        if len(_known) >= _MOST_REMEMBERED:
            _known.clear()
        _known[signature] = made or False
        return result
    return program(tensors) if program else modules()


def _is_token(x: Tensor, cache: LayerCache) -> bool:
    if not isinstance(x, Tensor) or not isinstance(cache, LayerCache) or not cache.states:
        return False
    return x.ndim == 3 and x.shape[1] == 1 and x.shape[0] <= MOST_ROWS


def _signature(mixer: Mixer, x: Tensor, cache: LayerCache) -> tuple[tuple[object, ...], list[Tensor]]:
    """The signature of a step, and the tensors that it is of. It is empty where there is none."""
    if any_hook_of_all_modules() or "mix" in mixer.__dict__:
        return (), []
    states = cache.states
    signature: list[object] = [torch.are_deterministic_algorithms_enabled(), *states]
    given: list[Tensor | None] = [x, *states.values()]
    modules: list[Any] = [mixer]
    for module in modules:  # which grows
        if module is None:
            signature.append(None)
            continue
        kind, own = type(module), module.__dict__
        options = _options[kind] if kind in _options else _learnt(module)
        if options is None or not is_as_its_class(own):
            return (), []
        signature.append(kind)
        if options:
            signature += [own.get(option) for option in options]
        for kept, by_name in ((given, own["_parameters"]), (given, own["_buffers"]), (modules, own["_modules"])):
            if by_name:
                signature += by_name
                kept += by_name.values()
    tensors = [y for y in given if y is not None]
    if not are_plain(tensors):
        return (), []
    for y in given:
        signature += (None,) if y is None else (y.shape, y.stride(), y.dtype)
    return tuple(signature), tensors


def _learnt(module: nn.Module) -> tuple[str, ...] | None:
    """The names of what makes one module of its class another than the next, beside its parameters and modules."""
    options = None
    if type(module).__module__.startswith("fulmen.nn."):
        usual = vars(nn.Module())
        options = tuple(name for name, x in vars(module).items() if name not in usual and not isinstance(x, Tensor))
    _options[type(module)] = options
    return options
