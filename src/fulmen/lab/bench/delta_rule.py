"""Our kernels of the delta rule, as a report shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fulmen.lab.bench.suite import Kernels, Sizes
from fulmen.runtime.architectures import Architecture

CORE = (
    ("chunk", "16", "Tokens whose triangular system is solved at once"),
    ("registers", "6 × 16 (AVX2, NEON), 16 × 16 (AVX-512)", "Results the micro-kernel holds"),
)


def _tiles(sizes: Sizes, dtype: torch.dtype) -> dict[str, Callable[[Architecture], Any]]:
    """See :mod:`fulmen.ops.delta_rule.triton.tiles`."""
    from fulmen.ops.delta_rule.triton import tiles

    chunk = tiles.chunk_size(dtype, sizes.dim)

    def precision(on: Architecture, few: str) -> str:
        return {torch.float32: on.single, torch.float16: "three terms"}.get(dtype, few)

    return {
        "Inverses, token decay": lambda on: tiles.prepare_tile(on, chunk, sizes.dim, channel=False),
        "Inverses, channel decay": lambda on: tiles.prepare_tile(on, chunk, sizes.dim, channel=True),
        "Walk": lambda on: tiles.walk_tile(on, chunk, sizes.dim, sizes.dim, precision(on, "one term")),
        "Gradients, a decay's too": lambda on: tiles.gradient_tile(on, chunk, sizes.dim, precision(on, "two terms")),
    }


KERNELS = Kernels("delta_rule", _tiles, CORE)
