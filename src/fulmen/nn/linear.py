"""Linear layers whose products of 16 bits are as fast as those of float32.

On a CPU without instructions for them torch multiplies bfloat16 and float16 at a quarter of its float32 rate, and in a
backward at less than a hundredth of it. There the CPU core converts the factors as it reads them and multiplies in
float32, to the same result: a sum in float32, rounded once. All else is torch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fulmen.nn import native_matmul
from fulmen.runtime import core
from fulmen.runtime.tensors import autocast
from fulmen.runtime.torch_private import any_autocast

# Below, the way to a product takes longer than torch loses. One row is as fast as its weights come from memory.
_FEWEST_ROWS, _FEWEST_TERMS = 2, 2**18
# Instructions with which torch multiplies a dtype about as fast as float32, or faster.
_INSTRUCTIONS = {
    torch.bfloat16: ("amx_bf16", "avx_ne_convert"),
    torch.float16: ("amx_fp16", "avx512_fp16", "avx_ne_convert"),
}


class Linear(nn.Linear):
    """``torch.nn.Linear``, with :func:`linear` for its product."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's own name for it
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``: x ``[..., inputs]``, weight ``[outputs, inputs]``, bias ``[outputs]``."""
    if x.dtype not in SLOW and not any_autocast():
        return functional.linear(x, weight, bias)
    a, b = autocast(x, weight)
    added = None if bias is None else bias.to(a.dtype)
    if a.dtype not in SLOW or not native_matmul.takes(a, b, added) or not _is_worthwhile(a, b):
        return functional.linear(x, weight, bias)
    return native_matmul.matmul(a.flatten(0, -2), b, added).unflatten(0, a.shape[:-1])


def _is_worthwhile(x: Tensor, weight: Tensor) -> bool:
    """One that is differentiated always is: torch's gradient of x reads the weights against the grain."""
    rows = x.numel() // max(x.shape[-1], 1)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return rows > 0
    return rows >= _FEWEST_ROWS and rows * weight.numel() >= _FEWEST_TERMS


def _is_slow(dtype: torch.dtype) -> bool:
    """Whether torch multiplies factors of this dtype slower than the core does on this CPU."""
    found: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # which early versions have not got
    if core.core is None or found.get("architecture") != "x86_64":
        return False
    if any(found.get(instruction) for instruction in _INSTRUCTIONS[dtype]):
        return False
    # A build that multiplies pairs of bfloat16 is chosen where the CPU does so faster than it multiplies floats.
    return dtype != torch.bfloat16 or not core.core.multiplies_pairs


SLOW = frozenset(dtype for dtype in _INSTRUCTIONS if _is_slow(dtype))
"""Dtypes whose products are ours."""
