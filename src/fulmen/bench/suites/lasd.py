"""Causal linear attention with scalar decays against softmax attention and its relatives (report "Lightning Attention
with Scalar Decay")."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

import fulmen
from fulmen.baselines.gla import gla, simple_gla
from fulmen.baselines.lightning2 import lightning2_chunk_loop, lightning2_parallel
from fulmen.bench.peers import peer, why_missing
from fulmen.bench.softmax import exact_softmax, flash
from fulmen.bench.suite import (
    ATTENTION_INPUTS,
    PUBLISHED_LENGTHS,
    Column,
    Preset,
    Sizes,
    Suite,
    batch_head_dim,
    few_heads,
)
from fulmen.gpu.architectures import kernels_run_on


def linear(schedule: str, backend: str = "auto") -> Callable[..., Tensor]:
    """linear_attention of q, k, v and, unless there is none, a decay."""

    def run(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None) -> Tensor:
        return fulmen.linear_attention(q, k, v, decay=decay, schedule=schedule, backend=backend)

    return run


def _lightning2_chunk_loop(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    if kernels_run_on(q.device) and not why_missing("lightning_attn"):
        return peer("lightning_attn.ops.lightning_attn_func")(q, k, v, -decay)
    return lightning2_chunk_loop(q, k, v, decay)


def _gla(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    if not q.is_cuda:
        return gla(q, k, v, decay)
    return peer("fla.ops.gla.chunk_gla")(q, k, v, decay, scale=1.0)[0]


def _simple_gla(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    if q.is_cuda:
        return peer("fla.ops.simple_gla.chunk_simple_gla")(q, k, v, decay, scale=1.0)[0]
    if why_missing("fla"):
        return simple_gla(q, k, v, decay)
    return peer("fla.ops.simple_gla.naive.naive_chunk_simple_gla")(q, k, v, decay, scale=1.0)[0]


EXACT = linear("auto", "reference")
QKV = ("q", "k", "v")

LASD = Suite(
    name="lasd",
    about="causal linear attention with scalar decays, against softmax attention and others",
    axis="n",
    baseline="Flash",
    modes=("fwd", "bwd"),
    sections={
        "": (
            Column(
                "LASD_R",
                'constant decay, schedule="recurrent"',
                (*QKV, "constant"),
                linear("recurrent"),
                EXACT,
                fixed=("constant",),
            ),
            Column(
                "LASD_P",
                'constant decay, schedule="parallel"',
                (*QKV, "constant"),
                linear("parallel"),
                EXACT,
                fixed=("constant",),
            ),
            Column("LAND_P", 'no decay, schedule="parallel"', QKV, linear("parallel"), EXACT),
            Column("LASD_PL", 'learnable decay, schedule="parallel"', (*QKV, "constant"), linear("parallel"), EXACT),
            Column("LASD3_P", 'decay per token, schedule="parallel"', (*QKV, "by_token"), linear("parallel"), EXACT),
            Column(
                "Flash",
                "softmax attention: flash-attn on CUDA if installed, else the flash kernel of torch SDPA",
                QKV,
                flash,
                exact_softmax,
                heads_first=True,
                growth=2,
            ),
            Column(
                "LP",
                "Lightning Attention-2, all blocks in parallel: lightning2_parallel",
                (*QKV, "constant"),
                lightning2_parallel,
                EXACT,
                fixed=("constant",),
                heads_first=True,
            ),
            Column(
                "LC",
                "Lightning Attention-2, one loop over chunks: lightning-attn on CUDA if installed, else "
                "lightning2_chunk_loop",
                (*QKV, "constant"),
                _lightning2_chunk_loop,
                EXACT,
                fixed=("constant",),
                heads_first=True,
            ),
            Column(
                "GLA_K",
                "vector decay on keys: fla's chunk_gla on CUDA; on CPU our torch form of its algorithm",
                (*QKV, "by_key"),
                _gla,
                EXACT,
                peer="fla",
            ),
            Column(
                "GLA_S_K",
                "decay per token: fla's chunk_simple_gla on CUDA; on CPU its naive chunk form if fla is installed, "
                "else our torch form of its algorithm",
                (*QKV, "by_token"),
                _simple_gla,
                EXACT,
                peer="fla",
            ),
        )
    },
    inputs=ATTENTION_INPUTS,
    presets={
        "published": Preset((Sizes(4, 32, 128), Sizes(1, 16, 128)), PUBLISHED_LENGTHS),
        "laptop": Preset((Sizes(1, 16, 128),), PUBLISHED_LENGTHS[:6]),
        "quick": Preset((Sizes(1, 4, 128),), (64, 256, 1024, 4096)),
    },
    check_sizes=few_heads,
    sizes_in_title=batch_head_dim,
)
