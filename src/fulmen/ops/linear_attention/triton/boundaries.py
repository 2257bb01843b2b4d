"""The states at the boundaries of segments, as the kernels find them, and gradients of heads that share one."""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.ops.chunks.sequences import sum_shared_heads
from fulmen.ops.linear_attention.problem import Attention
from fulmen.ops.linear_attention.triton.launch import Launcher


def new_boundaries(run: Launcher, p: Attention) -> Tensor:
    sequences, heads, key_size, value_size = p.state_shape
    return p.k.new_empty(sequences, heads, run.partition.segments + 1, key_size, value_size, dtype=torch.float32)


def fill_boundary(boundary: Tensor, state: Tensor | None) -> None:
    if state is None:
        boundary.zero_()
    else:
        boundary.copy_(state)


def per_head(run: Launcher, writes: str, gradient: Tensor | None) -> Tensor | None:
    """Where a walk writes a result: heads that share one head are added up afterwards, before rounding. So are merged
    pairs in float16, which is held to half a unit in the last place."""
    added_to = run.logs.of_axis(writes)[0] is not None and run.dtype == torch.float16
    if gradient is None or (gradient.shape[2] == run.heads and not added_to):
        return gradient
    return gradient.new_empty(*gradient.shape[:2], run.heads, gradient.shape[3], dtype=torch.float32)


def sum_heads(of_heads: Tensor | None, gradient: Tensor | None) -> None:
    if of_heads is not None and gradient is not None and of_heads is not gradient:
        gradient.copy_(sum_shared_heads(of_heads, gradient.shape[2]))
