"""Whether Triton kernels can run here, told without importing triton where it has its own name."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch

from fulmen.runtime.architectures import interpreted

OLDEST_TRITON = (3, 7)


def why_triton_is_unavailable() -> str:
    """One sentence; empty if it is available. In the interpreter it is, for CPU tensors."""
    # Unlike torch.cuda.is_available, counting the devices leaves the process able to fork.
    if not interpreted() and torch.cuda.device_count() == 0:
        return "torch finds no CUDA or HIP device"
    return why_triton_is_missing()


def why_triton_is_missing() -> str:
    """One sentence; empty if kernels can be compiled here, whether or not there is a GPU to run them on."""
    if find_spec("triton") is None:
        return "triton is not installed (pip install 'fulmen[gpu]')"
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("triton")
    except PackageNotFoundError:  # torch for ROCm brings it under another name
        found = import_module("triton").__version__
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST_TRITON:
        return f"triton {found} is too old: {'.'.join(map(str, OLDEST_TRITON))} or newer is needed"
    return ""
