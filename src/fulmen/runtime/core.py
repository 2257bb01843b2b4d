"""The CPU core: checking and calling the library that `pip install` built from csrc/.

A call takes one struct (:mod:`fulmen.runtime.core_structs`), which ``struct.pack`` writes in two microseconds. The
library is loaded after torch, so that both share one OpenMP runtime and one pool of threads.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from fulmen.runtime import core_file, in_flight
from fulmen.runtime.core_structs import CODES, HEADER, STATE, TENSOR, Struct, Words
from fulmen.runtime.recording import note_call
from fulmen.runtime.warning import GROWTH, warn_once

DTYPES = {
    torch.float32: CODES["FLOAT32"],
    torch.bfloat16: CODES["BFLOAT16"],
    torch.float16: CODES["FLOAT16"],
}
NO_TENSOR: Words = (0,) * (TENSOR.size // 8)
NO_STATE: Words = (0,) * (STATE.size // 8)

_VERSION, _GROWS, _NO_WORKSPACE = CODES["VERSION"], CODES["GROWS"], CODES["NO_WORKSPACE"]


class RefusedError(RuntimeError):
    """A call that the core refused, with its status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"the CPU core refused a call: {text}")
        self.status = status


class Core:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        version = self._function("version")()
        if version != _VERSION:
            raise OSError(f"{path.name} has interface version {version}, and this package needs {_VERSION}")
        self._error_text = self._function("error_text", ctypes.c_int64, result=ctypes.c_char_p)
        self._select = self._function("isa_select", ctypes.c_int64)
        self._current = self._function("isa_current")
        self._multiplies_pairs = self._function("isa_multiplies_pairs", ctypes.c_int64)
        self._multiplies_tiles = self._function("isa_multiplies_tiles", ctypes.c_int64)
        name = self._function("isa_name", ctypes.c_int64, result=ctypes.c_char_p)
        supported = self._function("isa_supported", ctypes.c_int64)
        self._names = [name(i).decode() for i in range(self._function("isa_count")())]
        self.builds = [build for i, build in enumerate(self._names) if supported(i)]
        self.openmp = bool(self._function("has_openmp")())
        self._calls: dict[Struct, ctypes._FuncPointer] = {}
        self.call_number = self._function("call_number", ctypes.c_char_p)
        self._run_program = self._function("run_program", ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p)

    def _function(self, name: str, *arguments: type, result: type = ctypes.c_int64) -> ctypes._FuncPointer:
        function = getattr(self.library, f"fulmen_{name}")
        function.argtypes, function.restype = arguments, result
        return function

    @property
    def isa(self) -> str:
        """The name of the build in use."""
        return self._names[self._current()]

    @property
    def multiplies_pairs(self) -> bool:
        """Whether the build in use multiplies bfloat16 inputs in pairs."""
        return bool(self._multiplies_pairs(self._current()))

    @property
    def multiplies_tiles(self) -> bool:
        """Whether it multiplies them in AMX's tiles, where an operator does."""
        return bool(self._multiplies_tiles(self._current()))

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

    def run(self, call: Struct, packed: bytes) -> None:
        """Make a call, packed with the header that :func:`header` gives.

        A call that is refused has written nothing. One that meets a log-decay above 0 has been carried out when this
        warns, or raises where warnings are errors.
        """
        note_call(call, packed)
        in_flight.begin()
        try:
            status = self._status(call, packed)
        finally:
            in_flight.end()
        self._after(status)

    def run_program(self, program: bytes, addresses: bytes) -> None:
        """Make the calls of a :class:`fulmen.runtime.program.Program`. Of one that is refused, some may have been
        made."""
        in_flight.begin()
        try:
            status = self._run_program(program, HEADER.pack_words(header(HEADER)), addresses)
        finally:
            in_flight.end()
        self._after(status)

    def _after(self, status: int) -> None:
        if _memory.allocated:
            _memory.allocated.clear()
        if status == _GROWS:
            warn_once(GROWTH)
        elif status:
            self._refuse(status)

    def workspace_bytes(self, call: Struct, packed: bytes) -> int:
        """The workspace of a call, packed with :func:`measuring_header`; nothing is computed."""
        status = self._status(call, packed)
        if status != _NO_WORKSPACE:
            self._refuse(status)
        return _memory.measured

    def _status(self, call: Struct, packed: bytes) -> int:
        function = self._calls.get(call)
        if function is None:
            function = self._calls[call] = self._function(call.name.removesuffix("_call"), ctypes.c_char_p)
        return function(packed)

    def _refuse(self, status: int) -> None:
        error, _memory.error = _memory.error, None
        raise error or RefusedError(status, self._error_text(status).decode())


class _Memory(threading.local):
    """The workspace of the calls of one thread.

    Small calls get memory that the thread keeps; others have it allocated, by torch, whose account of memory then has
    it, once the core has planned what it needs.
    """

    ALIGNMENT = 64
    KEPT_BYTES = 512 * 1024  # a forward of D = E = 128 on three threads; the pages that nobody writes take no memory

    def __init__(self) -> None:
        self._kept = self._new(self.KEPT_BYTES)
        self.kept = self.address(self._kept)
        self.allocated: list[Tensor] = []
        self.error: BaseException | None = None
        self.measured = 0

    def _new(self, size: int) -> Tensor:
        return torch.empty(size + self.ALIGNMENT, dtype=torch.uint8, device="cpu")

    def address(self, memory: Tensor) -> int:
        return -(-memory.data_ptr() // self.ALIGNMENT) * self.ALIGNMENT

    def allocate(self, size: int) -> int | None:
        # An exception cannot pass through the core: run() raises it, be it the KeyboardInterrupt of a Ctrl-C.
        try:
            self.allocated.append(self._new(size))
            return self.address(self.allocated[-1])
        except BaseException as error:
            self.error = error
            return None


def _measure(size: int) -> None:
    _memory.measured = size


_memory = _Memory()
_callback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64)
_callbacks = [_callback(lambda size: _memory.allocate(size)), _callback(_measure)]
_ALLOCATE, _MEASURE = (ctypes.cast(function, ctypes.c_void_p).value for function in _callbacks)


def header(call: Struct) -> Words:
    """The first words of a call."""
    return HEADER.words(
        bytes=call.size,
        version=_VERSION,
        threads=torch.get_num_threads(),
        workspace=_memory.kept,
        workspace_bytes=_Memory.KEPT_BYTES,
        allocate=_ALLOCATE,
    )


def measuring_header(call: Struct) -> Words:
    """The same for :meth:`Core.workspace_bytes`."""
    return HEADER.words(
        bytes=call.size,
        version=_VERSION,
        threads=torch.get_num_threads(),
        workspace=0,
        workspace_bytes=0,
        allocate=_MEASURE,
    )


def tensor(x: Tensor | None) -> Words:
    """``[B, N, heads, size]`` or ``[B, N, heads]``."""
    if x is None:
        return NO_TENSOR
    strides = x.stride()
    return TENSOR.words(
        data=x.data_ptr(),
        dtype=DTYPES[x.dtype],
        stride_batch=strides[0],
        stride_token=strides[1],
        stride_head=strides[2],
    )


def state(x: Tensor | None) -> Words:
    """``[B, H, D, E]``, any strides. Dimensions of one element, whose stride means nothing, count as dense."""
    if x is None:
        return NO_STATE
    strides = x.stride()
    if 1 in x.shape:
        strides = tuple(1 if size == 1 else stride for size, stride in zip(x.shape, strides, strict=True))
    return STATE.words(
        data=x.data_ptr(),
        dtype=DTYPES[x.dtype],
        stride_batch=strides[0],
        stride_head=strides[1],
        stride_row=strides[2],
        stride_column=strides[3],
    )


def _load() -> Core | str:
    """The core, or in one sentence why there is none."""
    named = os.environ.get("FULMEN_CORE")  # another build of the library, such as the one with sanitizers
    folders = [Path(folder) for folder in sys.modules["fulmen"].__path__]
    found = core_file.named(Path(named)) if named else core_file.find(folders)
    if isinstance(found, str):
        return found
    try:
        core = Core(found)
    except (OSError, AttributeError) as error:
        return f"the CPU core cannot be loaded: {error}"
    return core.check() or core


_found = _load()
core: Core | None = _found if isinstance(_found, Core) else None
why_unavailable: str = _found if isinstance(_found, str) else ""


def require() -> Core:
    """The core, for a call that has chosen it."""
    assert core is not None, why_unavailable
    return core
