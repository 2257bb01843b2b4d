"""Running the Triton launchers without a GPU: launches are recorded, neither compiled nor executed.

Triton asks its active driver for everything it wants to know of a device. :func:`dry_run` puts a stand-in there, and
fake tensors have shapes and strides but no memory; so the ordinary launchers run from end to end, with the
specialisation that the architecture would get. A recorded launch can be compiled later
(:mod:`fulmen.lab.inspect.compilation`). Needs TRITON_INTERPRET unset.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from triton.backends.compiler import GPUTarget

from fulmen.lab.inspect.memory import Memory
from fulmen.runtime.architectures import Architecture, interpreted, pretend
from fulmen.runtime.torch_private import fake_tensors, map_tensors
from fulmen.triton_common.triton_private import recording


class Operand(NamedTuple):
    """What is left of a tensor in a recorded launch."""

    shape: tuple[int, ...]
    itemsize: int


class Launch(NamedTuple):
    """A launch, in values that another process can be sent. ``signature``, ``constants``, ``attributes`` and
    ``options`` are what Triton compiles the function for, in its own terms."""

    module: str
    kernel: str
    grid: tuple[int, int, int]
    arguments: dict[str, Any]  # tensors as Operand
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]


class RecordingDriver:
    """As much of a Triton driver as launching needs, for a device of ``architecture`` that does nothing."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return target_of(self.architecture)

    def get_current_device(self) -> str:
        # Triton keeps what it knows of a function by device: dry runs must not meet real devices there.
        return f"dry run of {self.architecture.name}"

    def get_current_stream(self, device: str) -> int:
        return 0


def target_of(architecture: Architecture) -> GPUTarget:
    return GPUTarget(architecture.backend, architecture.target, architecture.warp)


def recorder(launches: list[Launch]) -> Any:
    """What stands in for Triton's compilation of a function: its result adds to ``launches`` when it is launched."""

    class Recorded:
        function = packed_metadata = None

        def __init__(self, jit: Any, signature: Any, constants: Any, attributes: Any, options: Any) -> None:
            self.jit, self.what = jit, (signature, constants, attributes, options.__dict__)

        def launch_metadata(self, *_: Any) -> None:
            return None

        def run(self, x: int, y: int, z: int, *rest: Any) -> None:
            # Before the arguments come the stream, the function, two kinds of metadata and two hooks.
            values = map_tensors(lambda t: Operand(tuple(t.shape), t.element_size()), rest[6:])
            arguments = dict(zip(self.jit.arg_names, values, strict=True))
            launches.append(Launch(self.jit.module, self.jit.__name__, (x, y, z), arguments, *self.what))

    def record(
        jit: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, attributes: Any, warmup: bool
    ) -> Recorded:
        return Recorded(jit, signature, constants, attributes, options)

    return record


@contextmanager
def dry_run(architecture: Architecture) -> Iterator[tuple[list[Launch], Memory]]:
    """A block in which tensors are fake (make them with ``device="cpu"``) and launches recorded."""
    if interpreted():
        raise RuntimeError("unset TRITON_INTERPRET: what Triton interprets it neither compiles nor records")
    launches: list[Launch] = []
    with (
        recording(RecordingDriver(architecture), recorder(launches)),
        warnings.catch_warnings(),
        pretend(architecture),
        fake_tensors(),
        Memory() as memory,
    ):
        warnings.filterwarnings("ignore", message="Accessing the data pointer")
        yield launches, memory
