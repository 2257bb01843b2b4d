"""Output-gated, non-causal linear attention (report "flao"). Its three sections differ in what the backward finds kept.

Tensors are contiguous as ``[B, H, N, D]`` for the torch columns, as published; the fused one gets fulmen's own layout.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

import fulmen
from fulmen.lab.bench.compiled import Compiled
from fulmen.lab.bench.suite import PUBLISHED_LENGTHS, Column, Input, Preset, Sizes, Suite
from fulmen.ops.output_gate import reference, torch_matmul

GATED = ("q", "k", "v", "gate")


def _exact(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return fulmen.output_gated_attention(q, k, v, gate, backend="reference")


def _by_hand(save: tuple[str, ...]) -> Callable[..., Tensor]:
    return lambda q, k, v, gate: torch_matmul.attend(q, k, v, gate, save)


_COMPILED = Compiled(reference.attend)


def _columns(save: tuple[str, ...]) -> tuple[Column, ...]:
    by_hand = _by_hand(save)
    return (
        Column("Lao Tor", "torch, differentiated by autograd", GATED, reference.attend, _exact, heads_first=True),
        Column("Lao Tor C", "Lao Tor under torch.compile", GATED, _COMPILED, _exact, heads_first=True),
        Column("Flao Tor", "torch with a hand-written backward", GATED, by_hand, _exact, heads_first=True),
        Column("Flao Tor C", "Flao Tor under torch.compile", GATED, Compiled(by_hand), _exact, heads_first=True),
    )


def _fused(save: tuple[str, ...]) -> Column:
    def run(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return fulmen.output_gated_attention(q, k, v, gate, save=save)

    return Column("Flao Tri", "the fused kernel of output_gated_attention", GATED, run, _exact)


FLAO = Suite(
    name="flao",
    about="output-gated, non-causal linear attention g * (q (k^T v)), by what its backward recomputes",
    axis="n",
    baseline="Lao Tor",
    modes=("fwd", "bwd"),
    sections={
        "no cache": (*_columns(()), _fused(())),
        "cache": _columns(("kv",)),
        "cache kv, qkv": _columns(("kv", "qkv")),
    },
    inputs={name: Input("B N H D") for name in GATED},
    presets={
        "published": Preset((Sizes(12, 12, 128),), PUBLISHED_LENGTHS),
        "laptop": Preset((Sizes(2, 12, 128),), PUBLISHED_LENGTHS[:6]),
        "quick": Preset((Sizes(1, 12, 128),), (256, 1024, 4096)),
    },
    check_sizes=lambda sizes: sizes,
    sizes_in_title=lambda sizes: f"batch{sizes.batch}-head{sizes.heads}-dim{sizes.dim}-dim{sizes.dim}",
)
