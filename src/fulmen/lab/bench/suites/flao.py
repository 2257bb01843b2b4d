"""Output-gated, non-causal linear attention (report "flao"). Its three sections differ in what the backward finds kept.

Tensors are contiguous as ``[B, H, N, D]`` for the torch columns, as published; the fused one gets fulmen's own layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import fulmen
from fulmen.lab.bench.compiled import Compiled
from fulmen.lab.bench.owners import Owner, ours, rendered, theirs
from fulmen.lab.bench.softmax import exact_softmax
from fulmen.lab.bench.suite import (
    PUBLISHED_LENGTHS,
    Column,
    Input,
    Kernels,
    Preset,
    Sizes,
    Suite,
    Text,
    Work,
    product_flops,
    tensor_bytes,
)
from fulmen.ops.output_gate import reference, torch_matmul
from fulmen.runtime.architectures import Architecture

if TYPE_CHECKING:
    from fulmen.lab.inspect.dry_run import Launch

GATED = ("q", "k", "v", "gate")
IN_TORCH = rendered("torch")
Save = tuple[str, ...]  # what the forward keeps for the backward, of "kv" and "qkv"


def _exact(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return fulmen.output_gated_attention(q, k, v, gate, backend="reference")


_COMPILED = Compiled(reference.attend)


def _column(
    name: str, title: str, about: str, pros: str, cons: str, save: Save, function: Callable[..., Tensor],
    owner: Callable[[str], Owner] = IN_TORCH, heads_first: bool = True,
) -> Column:  # fmt: skip
    least, launched = partial(_least, save), partial(_launched, save)
    return Column(
        name, title, about, pros, cons, GATED, function, _exact, least, launched, owner, heads_first=heads_first
    )


def _columns(save: Save) -> tuple[Column, ...]:
    """Of one section. What autograd keeps it decides itself."""

    def by_hand(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return torch_matmul.attend(q, k, v, gate, save)

    return (
        _column(
            "Lao Tor",
            "torch, autograd",
            "torch, differentiated by autograd",
            pros="Nothing to maintain",
            cons="Keeps what autograd keeps",
            save=save,
            function=reference.attend,
        ),
        _column(
            "Lao Tor C",
            "torch, autograd, compiled",
            "Lao Tor under torch.compile",
            pros="Fewer passes over memory",
            cons="Compilation",
            save=save,
            function=_COMPILED,
        ),
        _column(
            "Flao Tor",
            "torch, backward by hand",
            "torch with a hand-written backward",
            pros="Chooses what is kept for the backward",
            cons="Several passes over memory",
            save=save,
            function=by_hand,
        ),
        _column(
            "Flao Tor C",
            "torch, backward by hand, compiled",
            "Flao Tor under torch.compile",
            pros="Chooses what is kept, fewer passes",
            cons="Compilation",
            save=save,
            function=Compiled(by_hand),
        ),
    )


def _fused(save: Save) -> Column:
    def run(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return fulmen.output_gated_attention(q, k, v, gate, save=save)

    return _column(
        "Flao Tri",
        "Fulmen, fused",
        "the fused kernel of output_gated_attention",
        pros="Each tensor is read once",
        cons="A kernel to maintain",
        save=save,
        function=run,
        owner=ours,
        heads_first=False,
    )


def _softmax(heads_first: bool) -> Column:
    """Softmax attention with the same gate: what models have today where they gate an output."""

    def run(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        if heads_first:
            return gate * scaled_dot_product_attention(q, k, v)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return gate * scaled_dot_product_attention(q, k, v).transpose(1, 2)

    def exact(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return gate * exact_softmax(q, k, v, causal=False)

    def least(sizes: Sizes, n: int) -> dict[str, Work]:
        tensor, product = tensor_bytes(sizes, n), 2 * sizes.batch * sizes.heads * n * n * sizes.dim
        return {"fwd": Work(5 * tensor, 2 * product), "bwd": Work(10 * tensor, 5 * product)}

    return Column(
        "SDPA" if heads_first else "SDPA-BNHD",
        "Gated softmax attention of torch" + ("" if heads_first else ", by token"),
        "softmax attention, multiplied by the gate: torch scaled_dot_product_attention"
        + ("" if heads_first else " on [B, N, H, D], as projections give it"),
        pros="What models gate today",
        cons="O(n²) complexity",
        takes=GATED,
        function=run,
        exact=exact,
        least=least,
        owner=theirs("torch"),
        heads_first=heads_first,
        growth=2,
    )


def _least(save: Save, sizes: Sizes, n: int) -> dict[str, Work]:
    """Of kᵀv and q (kᵀv), the backward recomputes what it does not find; of the two, only the second has a size."""
    tensor, product = tensor_bytes(sizes, n), product_flops(sizes, n)
    backward = Work((9 + ("qkv" in save)) * tensor, (6 - len(save)) * product)
    return {"fwd": Work(5 * tensor, 2 * product), "bwd": backward}


@cache
def _launched(save: Save, architecture: Architecture, sizes: Sizes, n: int) -> Mapping[str, list[Launch]]:
    from fulmen.lab.operators.output_gate.workloads import launched

    shape, keep = (sizes.batch, n, sizes.heads, sizes.dim), {f"keep_{name}": name in save for name in ("kv", "qkv")}
    forward, backward = launched(architecture, *shape, **keep)
    return {"fwd": forward, "bwd": backward}


def _tiles(sizes: Sizes, dtype: torch.dtype) -> dict[str, Callable[[Architecture], Any]]:
    from fulmen.ops.output_gate.triton.tiles import rows_tile, sum_tile

    return {
        "Sum of outer products: kv, dkv": lambda on: sum_tile(sizes.dim, sizes.dim, dtype, on),
        "Rows times a matrix: o, dq, dk, dv, dg": lambda on: rows_tile(sizes.dim, sizes.dim, dtype, on),
    }


CORE = (
    ("chunk", "32", "Tokens multiplied at once"),
    ("together", "4 heads", "Neighbours that walk together where heads interleave in memory, at most"),
    ("segments", "512 tokens", "The shortest: few heads are partitioned"),
)


SUITE = Suite(
    name="flao",
    about="output-gated, non-causal linear attention g * (q (k^T v)), by what its backward recomputes",
    text=Text(
        title="Linear Attention with an Output Gate",
        subject="o = g ⊙ (q · (kᵀv)), non-causal: autograd against a hand-written backward, and what that keeps.",
        algorithm="Output-Gated Linear Attention",
        formula="Forward:  O = G ⊙ (Q @ (K^T @ V))",
        complexity=(
            "O(n · D · E): two products for each head, and no n × n matrix",
            "cache: K^T V (D × E) and Q K^T V (n × E) are kept for the backward, or recomputed in it",
        ),
    ),
    axis="n",
    baseline="Lao Tor",
    modes=("fwd", "bwd"),
    sections={
        "no cache": (*_columns(()), _fused(()), _softmax(heads_first=True), _softmax(heads_first=False)),
        "cache": _columns(("kv",)),
        "cache kv, qkv": _columns(("kv", "qkv")),
    },
    inputs={name: Input("B N H D") for name in GATED},
    presets={
        "published": Preset((Sizes(12, 12, 128),), PUBLISHED_LENGTHS),
        "laptop": Preset((Sizes(2, 12, 128),), PUBLISHED_LENGTHS[:6]),
        "quick": Preset((Sizes(1, 12, 128),), (256, 1024, 4096)),
    },
    kernels=Kernels("output_gated_attention", _tiles, CORE),
    sizes_in_title=lambda sizes: f"batch{sizes.batch}-head{sizes.heads}-dim{sizes.dim}-dim{sizes.dim}",
)
