"""What every module that launches kernels imports: a guard for the device, and a correct interpreter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fulmen.runtime.architectures import interpreted

if interpreted():
    from fulmen.triton_common.interpreter import correct_bfloat16

    correct_bfloat16()

Run = TypeVar("Run", bound=Callable[..., Any])


def on_its_device(run: Run) -> Run:
    """Launch where the first argument is, a tensor or a call whose first field is one: Triton launches on the current
    device."""

    @wraps(run)
    def switched(first: Any, *args: Any) -> Any:
        device = (first if isinstance(first, Tensor) else first[0]).device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return run(first, *args)

    return cast(Run, switched)
