"""A function again, with other globals; and forwards of single modules, put in place and taken away.

transformers' mixers call functions of their file by name. Replacing such a global would change every model of that
file, so one module gets a copy of its class's forward that finds other functions under the same names.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

_MARK = "__fulmen__"


def called(function: Any) -> Iterator[tuple[str, Any]]:
    """The globals that a function names, under its decorators."""
    function = inspect.unwrap(function)
    for name in _names(function, "LOAD_GLOBAL"):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def attributes(function: Any) -> set[str]:
    """The attributes that a function reads, under its decorators."""
    return {*_names(inspect.unwrap(function), "LOAD_ATTR", "LOAD_METHOD")}


def _names(function: FunctionType, *operations: str) -> dict[str, None]:
    """In the order of the code."""
    code = dis.get_instructions(function)
    return dict.fromkeys(x.argval for x in code if x.opname in operations)


def with_globals(function: Any, replaced: Mapping[str, Any]) -> Any:
    """A copy of ``function``, and of what its decorators wrap, that finds ``replaced`` among its globals."""
    inner = getattr(function, "__wrapped__", None)
    cells = function.__closure__
    if inner is None:
        namespace = _namespace(function, replaced)
    else:
        namespace, copied = function.__globals__, with_globals(inner, replaced)
        if not any(cell.cell_contents is inner for cell in cells or ()):
            raise ValueError(f"a decorator of {inner.__qualname__} does not show what it wraps")
        cells = tuple(CellType(copied) if cell.cell_contents is inner else cell for cell in cells or ())
    copy: Any = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    if inner is None:
        del copy.__wrapped__
    else:
        copy.__wrapped__ = copied
    return copy


def _namespace(function: FunctionType, replaced: Mapping[str, Any]) -> dict[str, Any]:
    """The globals of a function as they are now, with others among them, as those of a module: torch.compile looks
    globals up by the name of their module, and would guard on what the function's own has under these names. What the
    function's file assigns later does not reach the copy."""
    name = f"{__name__}.{function.__module__}.{function.__qualname__}"
    module = sys.modules.setdefault(name, ModuleType(name))
    module.__dict__.update({**function.__globals__, **replaced, "__name__": name})
    return module.__dict__


def put(module: nn.Module, forward: Callable[..., Any], what: tuple[str, ...]) -> None:
    """Has ``forward`` compute in this module; ``what`` it brings is what :func:`found` says of it."""
    setattr(forward, _MARK, what)
    module.__dict__[_place(module)] = MethodType(forward, module)


def found(module: nn.Module) -> tuple[str, ...] | None:
    """What was put into this module, or into the one that it is a copy of. None: nothing."""
    return getattr(_own_forward(module), _MARK, None)


def take_away(module: nn.Module) -> None:
    """The module computes with its class's forward again."""
    if _place(module) == "forward":
        del module.__dict__["forward"]
    else:
        module.__dict__["_old_forward"] = MethodType(type(module).forward, module)


def is_as_its_class(module: nn.Module) -> bool:
    """Whether nobody gave this module a forward of its own."""
    place = _place(module)
    return place not in module.__dict__ or _own_forward(module) is type(module).forward


def _place(module: nn.Module) -> str:
    """Where the forward is that computes: accelerate's hooks move it, and put theirs in its place."""
    return "_old_forward" if "_old_forward" in module.__dict__ else "forward"


def _own_forward(module: nn.Module) -> Any:
    return getattr(module.__dict__.get(_place(module)), "__func__", None)
