"""The architectures the kernels are built for, and the one a device has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from fulmen.runtime.versions import release, triton_version


@dataclass(frozen=True)
class Architecture:
    """
    Attributes:
        name: as `fulmen inspect --arch` takes it.
        backend: "cuda" or "hip", as Triton calls it.
        target: Triton's name of it.
        warp: threads in a warp.
        shared_limit: bytes of shared memory one program may use.
        multiprocessors: of the largest card with it; of the device at hand where there is one.
        single: how products of float32 inputs are computed on tensor cores, in float32 accuracy.
    """

    name: str
    backend: str
    target: int | str
    warp: int
    shared_limit: int
    multiprocessors: int
    single: str


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("sm_80", "cuda", 80, 32, 166_912, 108, "tf32x3"),  # A100
        Architecture("sm_90", "cuda", 90, 32, 232_448, 132, "tf32x3"),  # H100
        Architecture("sm_100", "cuda", 100, 32, 232_448, 148, "tf32x3"),  # B200
        Architecture("sm_120", "cuda", 120, 32, 101_376, 170, "tf32x3"),  # RTX 5090
        Architecture("gfx942", "hip", "gfx942", 64, 65_536, 304, "ieee"),  # MI300X
        Architecture("gfx950", "hip", "gfx950", 64, 163_840, 256, "ieee"),  # MI355X
    )
}
# GPUs without an entry of their own, by what they share with one: mostly the shared memory.
_SAME_AS = {"sm_86": "sm_120", "sm_87": "sm_80", "sm_89": "sm_120", "sm_103": "sm_100", "sm_121": "sm_120"}
_SAME_AS |= dict.fromkeys(("gfx908", "gfx90a", "gfx940", "gfx941"), "gfx942")
OLDEST_GPU = (8, 0)  # compute capability
HOPPER = (9, 0)
# Before, products of transposed results came out wrong there: fla-org/flash-linear-attention#640.
OLDEST_TRITON_ON_HOPPER = (3, 7, 1)

_pretended: Architecture | None = None


@contextmanager
def pretend(architecture: Architecture) -> Iterator[None]:
    """Launch for ``architecture`` whatever the device is; for dry runs."""
    global _pretended
    before, _pretended = _pretended, architecture
    try:
        yield
    finally:
        _pretended = before


def kernels_run_on(device: torch.device) -> bool:
    """Whether Triton kernels take tensors on ``device``: on a GPU, in the interpreter, and in a dry run."""
    return device.type == "cuda" or interpreted() or _pretended is not None


def architecture_of(device: torch.device) -> Architecture:
    """What launches on ``device`` are made for. The interpreter runs on a CPU what an A100 would run."""
    return _pretended or _architecture_of(device)


@cache
def _architecture_of(device: torch.device) -> Architecture:
    if interpreted() or device.type != "cuda":
        return ARCHITECTURES["sm_80"]
    if reason := why_unsupported(device):
        raise RuntimeError(f"{reason}: use backend='torch'")
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        name = _amd_name(properties)
        found = ARCHITECTURES[_SAME_AS.get(name, name)]
    else:
        capability = 10 * properties.major + properties.minor
        known = [a for a in ARCHITECTURES.values() if isinstance(a.target, int) and a.target <= capability]
        found = ARCHITECTURES[_SAME_AS.get(f"sm_{capability}", known[-1].name)]
    return replace(found, multiprocessors=properties.multi_processor_count)


@cache
def why_unsupported(device: torch.device) -> str:
    """Why the kernels are not made for a GPU, in one sentence; empty if they are. Starts CUDA."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        made_for, name = sorted({*_SAME_AS, *ARCHITECTURES}), _amd_name(properties)
        amd = ", ".join(known for known in made_for if known.startswith("gfx"))
        return "" if name in made_for else f"the Triton kernels are made for {amd}, and this GPU is {name}"
    capability = properties.major, properties.minor
    if capability < OLDEST_GPU:
        needed, found = _dotted(OLDEST_GPU), _dotted(capability)
        return f"the Triton kernels need compute capability {needed} (bfloat16 tensor cores), and this GPU has {found}"
    triton = triton_version()
    if capability == HOPPER and triton is not None and release(triton) < OLDEST_TRITON_ON_HOPPER:
        needed = _dotted(OLDEST_TRITON_ON_HOPPER)
        return f"triton {triton} miscompiles products of matrices on Hopper GPUs: {needed} or newer is needed"
    return ""


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _amd_name(properties: Any) -> str:
    name: str = properties.gcnArchName
    return name.partition(":")[0]


def interpreted() -> bool:
    """Whether Triton runs its kernels in the interpreter, on CPU tensors: as Triton itself reads the variable."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
