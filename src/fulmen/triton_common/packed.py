"""Tokens after the last of the packed sequences, which no sequence has."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fulmen.triton_common.naming import named
from fulmen.triton_common.operands import UNIT, store_rows, tokens
from fulmen.triton_common.tiles import launch_options


@triton.jit(repr=named("clear_rest"), do_not_specialize=("length", "sequences"))
def clear_rest(x, cu_seqlens, length, sequences, heads, C: tl.constexpr, K: tl.constexpr):
    """Zeros for them, where ``cu_seqlens`` ends before the tensor does. Mostly there are none: it only looks."""
    program = tl.program_id(0)
    head, chunk = program % heads, (program // heads).to(tl.int64)
    end = tl.load(cu_seqlens + sequences).to(tl.int64)
    first = tl.maximum(chunk * C, end)
    valid = tl.minimum((chunk + 1) * C, length) - first
    if valid > 0:
        zeros = tl.zeros([C, K], tl.float32)
        for column in range(0, x.size, K):
            store_rows(x, chunk * 0, first, head, tl.arange(0, C), valid, column + tl.arange(0, K), zeros)


def clear_after_last(cu_seqlens: Tensor, *results: Tensor | None) -> None:
    """Zeros for the tokens of each result ``[1, N, heads, ...]`` that no sequence has. Whether there are any, only the
    device knows."""
    for result in results:
        if result is None or result.ndim < 3 or result.numel() == 0:
            continue
        _, length, heads, *size = result.shape
        clear_rest[(triton.cdiv(length, UNIT.value) * heads,)](
            tokens(result, heads), cu_seqlens, length, cu_seqlens.shape[0] - 1, heads,
            C=UNIT.value, K=min(triton.next_power_of_2(size[0] if size else 1), 64), **launch_options(warps=4),
        )  # fmt: skip
