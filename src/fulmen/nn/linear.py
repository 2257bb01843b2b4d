"""Linear layers whose products are the CPU core's where torch's are slow. All else is torch's.

On a CPU without instructions for them torch multiplies bfloat16 and float16 at a quarter of its float32 rate, and in a
backward at less than a hundredth of it. There the core converts the factors as it reads them and multiplies in float32,
to the same result: a sum in float32, rounded once.

On AMD's CPUs torch multiplies float32 with vectors of 256 bits, half of what those with units of 512 bits can do.

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
_FEWEST_ROWS, _FEWEST_TERMS, _FEWEST_TERMS_OF_FLOATS = 2, 2**18, 2**22
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
    if x.dtype in FEW_ROWS and not differentiated and rows <= native_matmul.MOST_ROWS:
        if torch.compiler.is_compiling():  # which knows better what to do with weights that do not change
            return False
        large = rows > 0 and weight.numel() >= _FEWEST_TERMS
        return large and weight.stride(-1) == 1 and torch.get_num_threads() > 1
    if x.dtype not in SLOW:
        return False
    if x.dtype == torch.float32:
        return rows * weight.numel() >= _FEWEST_TERMS_OF_FLOATS
    if differentiated:  # always: torch's gradient of x reads the weights against the grain
        return rows > 0
    return rows >= _FEWEST_ROWS and rows * weight.numel() >= _FEWEST_TERMS


def _capabilities() -> Mapping[str, Any]:
    """Of an x86 CPU; nothing of others, and with early versions of torch."""
    found: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return found if core.core is not None and found.get("architecture") == "x86_64" else {}


def _is_slow(dtype: torch.dtype) -> bool:
    """Whether torch multiplies factors of this dtype slower than the core does on this CPU."""
    found = _capabilities()
    if dtype == torch.float32:  # AVX-VNNI came with the first of AMD's CPUs whose units have 512 bits, Zen 5
        return _is_amd() and bool(found.get("avx_vnni")) and core.require().isa.startswith("avx512")
    if not found or any(found.get(instruction) for instruction in _INSTRUCTIONS[dtype]):
        return False
    # A build that multiplies pairs of bfloat16 is chosen where the CPU does so faster than it multiplies floats.
    return dtype != torch.bfloat16 or not core.require().multiplies_pairs


def _is_amd() -> bool:
    """Where MKL, whose products of float32 are torch's, does without AVX-512, and reads weights with one thread for few
    rows (https://github.com/pytorch/pytorch/issues/96643)."""
    return str(_capabilities().get("cpu_name")).startswith("AMD")


SLOW = frozenset(dtype for dtype in (*_INSTRUCTIONS, torch.float32) if _is_slow(dtype))
"""Dtypes that torch multiplies slower than the core does."""
FEW_ROWS = frozenset({torch.float32} if _is_amd() else ())
"""Dtypes of which it does so with few rows."""
