"""Decays that are set by the number of a head, not learned."""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.runtime.checks import check_count


def slopes(num_heads: int, *, layer: int | None = None, num_layers: int | None = None) -> Tensor:
    """``[H]``, float32: 2^(-8 (h + 1) / H), as in ALiBi. ``log_decay=-slopes(H)`` makes them decays.

    Args:
        num_heads: H.
        layer, num_layers: with both, MiniMax's (lightning attention's), which fall from layer to layer: times
            1 - layer / (num_layers - 1), and next to none in the last.
    """
    check_count("num_heads", num_heads)
    exponents = torch.arange(1, num_heads + 1, dtype=torch.float32, device="cpu")
    found = torch.pow(2.0 ** (-8.0 / num_heads), exponents)
    if layer is None and num_layers is None:
        return found
    if layer is None or num_layers is None:
        raise ValueError(f"layer and num_layers must be given together; got {layer} and {num_layers}")
    check_count("num_layers", num_layers)
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer must be 0 to num_layers - 1 = {num_layers - 1}; got {layer}")
    # 1e-5 as in MiniMax's models, whose weights know it: one layer has a slope too, and the last one a decay
    return found * (1 - layer / (num_layers - 1 + 1e-5) + 1e-5)
