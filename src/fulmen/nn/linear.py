"""Linear layers whose products are the CPU core's where torch's are slow. All else is torch's.

On a CPU without instructions for them torch multiplies bfloat16 and float16 at a quarter of its float32 rate, and in a
backward at less than a hundredth of it. There the core converts the factors as it reads them and multiplies in float32,
to the same result: a sum in float32, rounded once.

The few rows of a decode step are as fast as their weights come from memory, which on AMD's CPUs torch reads with one
thread in float32, however many there are; and the core with all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fulmen.nn import native_matmul
from fulmen.runtime import core
from fulmen.runtime.replay import replayed
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
    if x.dtype in SLOW or x.dtype in FEW_ROWS or any_autocast():
        a, b = autocast(x, weight)
        added = None if bias is None else bias.to(a.dtype)
        if _is_worthwhile(a, b) and native_matmul.takes(a, b, added):
            return _product(a.flatten(0, -2), b, added).unflatten(0, a.shape[:-1])
    return functional.linear(x, weight, bias)


_product = replayed(native_matmul.matmul)


def _is_worthwhile(x: Tensor, weight: Tensor) -> bool:
    rows = prod(x.shape[:-1])
    differentiated = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if x.dtype in SLOW:  # when differentiated always: torch's gradient of x reads the weights against the grain
        return rows > 0 if differentiated else rows >= _FEWEST_ROWS and rows * weight.numel() >= _FEWEST_TERMS
    if x.dtype not in FEW_ROWS or differentiated or not 0 < rows <= native_matmul.MOST_ROWS:
        return False
    if torch.compiler.is_compiling():  # which knows better what to do with weights that do not change
        return False
    return weight.stride(-1) == 1 and weight.numel() >= _FEWEST_TERMS and torch.get_num_threads() > 1


def _capabilities() -> Mapping[str, Any]:
    """Of an x86 CPU; nothing of others, and with early versions of torch."""
    found: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return found if core.core is not None and found.get("architecture") == "x86_64" else {}


def _is_slow(dtype: torch.dtype) -> bool:
    """Whether torch multiplies factors of this dtype slower than the core does on this CPU."""
    found = _capabilities()
    if not found or any(found.get(instruction) for instruction in _INSTRUCTIONS[dtype]):
        return False
    # A build that multiplies pairs of bfloat16 is chosen where the CPU does so faster than it multiplies floats.
    return dtype != torch.bfloat16 or not core.require().multiplies_pairs


def _reads_with_one_thread() -> bool:
    """Whether torch does so with weights that few rows of float32 are multiplied by: MKL, on AMD's CPUs
    (https://github.com/pytorch/pytorch/issues/96643)."""
    return str(_capabilities().get("cpu_name")).startswith("AMD")


SLOW = frozenset(dtype for dtype in _INSTRUCTIONS if _is_slow(dtype))
"""Dtypes that torch multiplies slower than the core does."""
FEW_ROWS = frozenset({torch.float32} if _reads_with_one_thread() else ())
"""Dtypes of which it does so with few rows."""
