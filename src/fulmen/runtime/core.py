"""The CPU core: finding, checking and calling the library that `pip install` built from csrc/.

A call takes one struct, a plain sequence of 64-bit words, which ``struct.pack`` writes in two microseconds. The library
is loaded after torch, so that both share one OpenMP runtime and one pool of threads.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

ABI_VERSION = 2
_NAMES = {"win32": "fulmen_core.dll", "darwin": "libfulmen_core.dylib"}
_WORKSPACE_ALIGNMENT = 64

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# The words of a tensor ([B, N, heads, size]: address, dtype, three strides), of a state (address, four strides), and of
# one that is absent. Both are five words long.
Words = tuple[int, ...]
TENSOR = STATE = "5q"
ABSENT: Words = (0, 0, 0, 0, 0)


class Core:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        version = self._function("abi_version")()
        if version != ABI_VERSION:
            raise OSError(f"{path.name} has interface version {version}, and this package needs {ABI_VERSION}")
        self._error_text = self._function("error_text", ctypes.c_int64, result=ctypes.c_char_p)
        self._select = self._function("isa_select", ctypes.c_int64)
        self._current = self._function("isa_current")
        name = self._function("isa_name", ctypes.c_int64, result=ctypes.c_char_p)
        supported = self._function("isa_supported", ctypes.c_int64)
        self._names = [name(i).decode() for i in range(self._function("isa_count")())]
        self.builds = [build for i, build in enumerate(self._names) if supported(i)]
        self.openmp = bool(self._function("has_openmp")())
        self._calls: dict[str, ctypes._FuncPointer] = {}

    def _function(self, name: str, *arguments: type, result: type = ctypes.c_int64) -> ctypes._FuncPointer:
        function = getattr(self.library, f"fulmen_{name}")
        function.argtypes, function.restype = arguments, result
        return function

    @property
    def isa(self) -> str:
        """The name of the build in use."""
        return self._names[self._current()]

    def check(self) -> str:
        """Compute something small with the build in use; should it come out wrong, go on to the next one that is right.

        Returns why no build can be used, or nothing.
        """
        passes = self._function("isa_self_check", ctypes.c_int64)
        wanted = os.environ.get("FULMEN_ISA")
        if wanted and wanted != self.isa:
            choices = ", ".join(self.builds)
            warnings.warn(f"FULMEN_ISA={wanted} is not among {choices}; using {self.isa}", stacklevel=2)
        for build in [self.isa, *self.builds]:
            if passes(self._names.index(build)):
                self._select(self._names.index(build))
                return ""
            warnings.warn(f"fulmen's {build} build computes wrongly on this machine and is not used", stacklevel=2)
        return "no build of the CPU core computes correctly on this machine"

    @contextmanager
    def using(self, isa: str) -> Iterator[None]:
        """Run with another build, for tests and measurements."""
        if isa not in self.builds:
            raise ValueError(f"isa must be one of {', '.join(self.builds)}; got {isa!r}")
        before = self._current()
        self._select(self._names.index(isa))
        try:
            yield
        finally:
            self._select(before)

    def fma_burst(self, rounds: int = 1_000_000) -> int:
        """Keep every thread busy with multiply-adds in registers; returns how many operations that was."""
        flops: int = self._function("fma_burst", ctypes.c_int64, ctypes.c_int64)(rounds, torch.get_num_threads())
        return flops

    def __call__(self, name: str, layout: struct.Struct, *words: float) -> None:
        """Run a call that needs no workspace."""
        self._raise_on(self._packed(name)(layout.pack(*words)))

    def workspace_bytes(self, name: str, layout: struct.Struct, before: Words, after: Words) -> int:
        """What a call needs; its struct is ``before``, the workspace's address and size, and ``after``."""
        needed: int = self._packed(f"{name}_workspace")(layout.pack(*before, 0, 0, *after))
        self._raise_on(-needed if needed < 0 else 0)
        return needed

    def with_workspace(self, name: str, layout: struct.Struct, before: Words, after: Words) -> None:
        """Run a call with workspace that torch allocates, so that torch's account of memory has it."""
        needed = self.workspace_bytes(name, layout, before, after)
        workspace = torch.empty(needed + _WORKSPACE_ALIGNMENT, dtype=torch.uint8)
        address = -(-workspace.data_ptr() // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
        self._raise_on(self._packed(name)(layout.pack(*before, address, needed, *after)))

    def _packed(self, name: str) -> ctypes._FuncPointer:
        if name not in self._calls:
            self._calls[name] = self._function(name, ctypes.c_char_p)
        return self._calls[name]

    def _raise_on(self, status: int) -> None:
        if status:
            raise RuntimeError(f"the CPU core refused a call: {self._error_text(status).decode()}")


def tensor(x: Tensor | None) -> Words:
    """``[B, N, heads, size]`` or ``[B, N, heads]``."""
    if x is None:
        return ABSENT
    strides = x.stride()
    return x.data_ptr(), DTYPES[x.dtype], strides[0], strides[1], strides[2]


def state(x: Tensor | None) -> Words:
    """``[B, H, D, E]``, any strides. Dimensions of one element, whose stride means nothing, count as dense."""
    if x is None:
        return ABSENT
    if 1 not in x.shape:
        return x.data_ptr(), *x.stride()
    return x.data_ptr(), *(1 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _load() -> Core | str:
    """The core, or in one sentence why there is none."""
    name = _NAMES.get(sys.platform, "libfulmen_core.so")
    # The package may have several folders: an editable install keeps what was compiled apart from the source.
    paths = [Path(folder) / name for folder in sys.modules["fulmen"].__path__]
    for path in paths:
        if path.is_file():
            try:
                core = Core(path)
            except (OSError, AttributeError) as error:
                return f"the CPU core cannot be loaded: {error}"
            return core.check() or core
    return "the CPU core was not built, because no C++ compiler was found when fulmen was installed"


_found = _load()
core: Core | None = _found if isinstance(_found, Core) else None
why_unavailable: str = _found if isinstance(_found, str) else ""


def require() -> Core:
    """The core, for a call that has chosen it."""
    assert core is not None, why_unavailable
    return core
