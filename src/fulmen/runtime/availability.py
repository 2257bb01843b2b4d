"""Whether Triton kernels can run here, told without importing triton where it has its own name."""

from __future__ import annotations

import torch

from fulmen.runtime.architectures import interpreted
from fulmen.runtime.versions import release, triton_version

OLDEST_TRITON = (3, 7)


def why_triton_is_unavailable() -> str:
    """One sentence; empty if it is available. In the interpreter it is, for CPU tensors."""
    # Unlike torch.cuda.is_available, counting the devices leaves the process able to fork.
    if not interpreted() and torch.cuda.device_count() == 0:
        return "torch finds no CUDA or HIP device"
    return why_triton_is_missing()


def why_triton_is_missing() -> str:
    """One sentence; empty if kernels can be compiled here, whether or not there is a GPU to run them on."""
    found = triton_version()
    if found is None:
        return "triton is not installed (pip install 'fulmen[gpu]')"
    if release(found) < OLDEST_TRITON:
        return f"triton {found} is too old: {'.'.join(map(str, OLDEST_TRITON))} or newer is needed"
    return ""
