"""What the suites of linear attention share: tensors, columns that know their decays, their limits and kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

import fulmen
from fulmen.lab.bench.suite import Column, Input, Kernels, Sizes, Work, product_flops, tensor_bytes
from fulmen.ops.chunks.decay_form import DecayForm, Decays
from fulmen.runtime.architectures import Architecture

if TYPE_CHECKING:
    from fulmen.lab.inspect.dry_run import Launch

NONE, HEAD, TOKEN, CHANNEL, BOTH_CHANNELS = map(Decays.named, ("none", "head", "token", "channel", "channel+value"))

FORMULA = """\
Forward:  O[c] = Q[c] @ S[c-1] + intra_chunk_attention
where:    S[c] = decay(c) * S[c-1] + K[c]^T @ V[c]"""
COMPLEXITY = (
    "Inter-chunk: O(n), one D × E state walks from chunk to chunk",
    "Intra-chunk: O(chunk²) for each chunk, a constant; O(n) in all",
    "**Overall: O(n)**, against O(n²) for softmax attention",
)
# The core's parameters, for Kernels.
CORE = (
    ("chunk", "16", "Tokens walked at once"),
    ("panel", "16 columns", "Of the state: all rows of a panel stay in L1"),
    ("registers", "6 × 16 (AVX2, NEON), 16 × 16 (AVX-512)", "Results the micro-kernel holds"),
)


def _unit(x: Tensor) -> Tensor:
    return normalize(x, dim=-1)


# As in the published lasd report: q and k normalised, log-decays logsigmoid of normal numbers. Log-decays are called by
# their form, those of the values' axis with "_v".
INPUTS = {
    "q": Input("B N H D", _unit),
    "k": Input("B N H D", _unit),
    "v": Input("B N H D"),
    "head": Input("H", logsigmoid),
    "token": Input("B N H", logsigmoid),
    "channel": Input("B N H D", logsigmoid),
    "channel_v": Input("B N H D", logsigmoid),
}


def log_decays(decays: Decays) -> tuple[str, ...]:
    """The names of the inputs that a column with these decays takes."""
    key = () if decays.key is DecayForm.NONE else (decays.key.name.lower(),)
    return key if decays.value is DecayForm.NONE else (*key, f"{decays.value.name.lower()}_v")


def few_heads(sizes: Sizes) -> Sizes:
    """Enough to see a mistake, little enough for a recurrence in float64."""
    return Sizes(batch=2, heads=2, dim=sizes.dim)


def linear(schedule: str, backend: str = "auto") -> Callable[..., Tensor]:
    """linear_attention of q, k, v and, unless there is none, a decay."""

    def run(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> Tensor:
        return fulmen.linear_attention(q, k, v, log_decay=log_decay, scale=1.0, schedule=schedule, backend=backend)

    return run


EXACT = linear("auto", "reference")


def attention_column(
    name: str, title: str, about: str, pros: str, cons: str, decays: Decays, function: Callable[..., Tensor], *,
    learnable: bool = True, **others: Any,
) -> Column:  # fmt: skip
    """A column of causal linear attention; ``learnable`` says whether its decays get gradients."""
    return Column(
        name, title, about, pros, cons, ("q", "k", "v", *log_decays(decays)), function, EXACT,
        least=partial(_least, decays),
        launched=partial(_launched, decays, learnable),
        fixed=() if learnable else log_decays(decays),
        **others,
    )  # fmt: skip


def log_decay_bytes(decays: Decays, sizes: Sizes, n: int) -> int:
    """In bfloat16; those of heads are too few to count."""
    shapes = decays.shapes(sizes.batch, n, sizes.heads, sizes.dim, sizes.dim)
    return 2 * sum(prod(shape) for shape in shapes.values() if len(shape) > 1)


def _least(decays: Decays, sizes: Sizes, n: int) -> dict[str, Work]:
    tensor, logs, product = tensor_bytes(sizes, n), log_decay_bytes(decays, sizes, n), product_flops(sizes, n)
    return {"fwd": Work(4 * tensor + logs, 2 * product), "bwd": Work(7 * tensor + 2 * logs, 5 * product)}


@cache
def _launched(
    decays: Decays, learnable: bool, architecture: Architecture, sizes: Sizes, n: int
) -> Mapping[str, list[Launch]]:
    from fulmen.lab.operators.linear_attention.workloads import attention_launched

    shape = sizes.batch, n, sizes.heads, sizes.dim
    forward, backward = attention_launched(architecture, decays, "auto", learnable, *shape)
    return {"fwd": forward, "bwd": backward}


def walk_tiles(
    decays: Decays, sizes: Sizes, dtype: torch.dtype, gradient: bool = False, small: bool = False
) -> Callable[[Architecture], Any]:
    """The tile of a walk; see :mod:`fulmen.ops.linear_attention.triton.tiles`."""
    from fulmen.ops.linear_attention.triton.launch import precision_of
    from fulmen.ops.linear_attention.triton.tiles import walk_tile

    channels = sizes.dim, sizes.dim
    return lambda architecture: walk_tile(
        architecture, *channels, precision_of(dtype, architecture, decays, channels, gradient), dtype, decays, small
    )


def _tiles(sizes: Sizes, dtype: torch.dtype) -> dict[str, Callable[[Architecture], Any]]:
    return {
        "Forward": walk_tiles(HEAD, sizes, dtype),
        "Backward, with a decay's gradient": walk_tiles(HEAD, sizes, dtype, gradient=True),
        'Backward of schedule="recompute"': walk_tiles(HEAD, sizes, dtype, small=True),
    }


KERNELS = Kernels("linear_attention", _tiles, CORE)
