"""What bfloat16 results are compared with: the arithmetic of GPU kernels, in torch.

Every factor of a product is rounded to bfloat16 where it enters it, whether it is an input, a state, a score or a row
that a decay has weighed; sums and states are float32. The torch backends are the formulas (chunks of 64 tokens): all
their products are written with ``@``, but for the score of a token with itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from fulmen.ops.linear_attention import inside_chunk

_product = Tensor.__matmul__
_own_scores = inside_chunk.own_scores


def rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def rounded_product(a: Tensor, b: Tensor) -> Tensor:
    return _product(rounded(a), rounded(b))


@contextmanager
def rounded_products() -> Iterator[None]:
    """Inside, factors of the torch backends are rounded."""
    with (
        patch.object(Tensor, "__matmul__", rounded_product),
        patch.object(inside_chunk, "own_scores", lambda a, b: rounded(_own_scores(a, b))),
    ):
        yield
