"""Names of Triton that are not public: all that are used, each with its reason. No public ones do the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from triton.runtime import driver
from triton.runtime.jit import JITCallable, JITFunction


@contextmanager
def recording(stand_in: Any, compile_function: Callable[..., Any]) -> Iterator[None]:
    """A block in which Triton asks ``stand_in`` for what it wants to know of a device, and has ``compile_function``
    (the function, key, signature, device, constants, options, attributes, whether it is a warm-up) compile for it.

    Triton has a public ``set_active`` for drivers, but none that gives back the one before, or none at all.
    """
    before = driver._active, JITFunction._do_compile
    driver.set_active(stand_in)
    JITFunction._do_compile = compile_function
    try:
        yield
    finally:
        driver._active, JITFunction._do_compile = before


def used_by(function: JITCallable) -> dict[str, Any]:
    """What a kernel's source names in its module: the functions it calls, the constants it reads. (Triton's own hash of
    a function also depends on which others were hashed before it.)"""
    return {name: function.__globals__.get(name) for name in function.fn.__code__.co_names}


def is_kernel(value: object) -> bool:
    return isinstance(value, JITCallable)


def interpreter() -> tuple[Any, Any]:
    """The class that interprets operations, whose bfloat16 is put right, and that of the values it computes on."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    return InterpreterBuilder, TensorHandle
