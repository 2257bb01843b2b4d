"""Running the Triton launchers without a GPU: launches are compiled and recorded, not executed.

Triton asks its active driver for everything it wants to know of a device. :func:`dry_run` puts a stand-in there, and
fake tensors have shapes and strides but no memory; so the ordinary launchers run from end to end, with the
specialisation and the compilation that the architecture would get. Needs TRITON_INTERPRET unset.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fulmen.gpu.architectures import Architecture, pretend
from fulmen.linear_attention.triton.recurrent import recur
from fulmen.linear_attention.triton.scan import scan
from fulmen.linear_attention.triton.states import fold, sum_segments, summarise
from fulmen.output_gate.triton import multiply_rows, sum_outer

KERNELS: tuple[Any, ...] = (scan, summarise, fold, sum_segments, recur, sum_outer, multiply_rows)


class Launch(NamedTuple):
    kernel: str
    grid: tuple[int, int, int]
    constants: dict[str, Any]  # the compile-time arguments
    source: Any  # what Triton compiles
    metadata: Any  # what it says of the result: shared memory, warps, ...


class RecordingDriver:
    """As much of a Triton driver as launching needs, for a device of ``architecture`` that does nothing."""

    def __init__(self, architecture: Architecture, launches: list[Launch]) -> None:
        self.architecture = architecture
        self.utils = self

        class Launcher:
            def __init__(self, source: Any, metadata: Any) -> None:
                self.source, self.metadata = source, metadata

            def __call__(self, *args: Any) -> None:
                names = self.source.fn.arg_names
                constants = {names[path[0]]: value for path, value in self.source.constants.items() if len(path) == 1}
                launches.append(Launch(self.source.fn.__name__, args[:3], constants, self.source, self.metadata))

        self.launcher_cls = Launcher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget(self.architecture.backend, self.architecture.target, self.architecture.warp)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        # No limit: a kernel that does not fit is to be reported, not refused.
        return {"max_shared_mem": 1 << 30}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        module, function, registers, spills, threads = 1, 1, 0, 0, 1024
        return module, function, registers, spills, threads


class Memory(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, while these are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self._alive:
                self._count(x.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._alive.add(key)
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.allocated -= size

    @contextmanager
    def workspace(self) -> Iterator[list[int]]:
        """Gives a list that will hold one number: the most that was allocated at once in the block."""
        found: list[int] = []
        before = self.peak = self.allocated
        yield found
        found.append(self.peak - before)


@contextmanager
def dry_run(architecture: Architecture) -> Iterator[tuple[list[Launch], Memory]]:
    """A block in which tensors are fake (make them with ``device="cpu"``) and launches recorded."""
    launches: list[Launch] = []
    before = driver._active
    driver.set_active(RecordingDriver(architecture, launches))
    _forget_compiled()
    try:
        with warnings.catch_warnings(), pretend(architecture), FakeTensorMode(), Memory() as memory:
            warnings.filterwarnings("ignore", message="Accessing the data pointer")
            yield launches, memory
    finally:
        driver._active = before
        _forget_compiled()


def compiled() -> dict[str, Any]:
    """What the block has compiled so far, by the hash that a launch's metadata has."""
    return {
        kernel.hash: kernel
        for function in KERNELS
        for cache in function.device_caches.values()
        for kernel in cache[0].values()
    }


def _forget_compiled() -> None:
    # Triton keeps what it compiled for each device, and takes the stand-in for one and the same device every time.
    for function in KERNELS:
        function.device_caches.clear()
