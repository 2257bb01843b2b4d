"""Causal linear attention with scalar decays against softmax attention and its relatives (report "Lightning Attention
with Scalar Decay")."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

import fulmen
from fulmen.lab.baselines.gla import gla, simple_gla
from fulmen.lab.baselines.lightning2 import lightning2_chunk_loop, lightning2_parallel
from fulmen.lab.bench.peers import peer, why_missing
from fulmen.lab.bench.softmax import exact_softmax, flash
from fulmen.lab.bench.suite import (
    ATTENTION_INPUTS,
    PUBLISHED_LENGTHS,
    Column,
    Preset,
    Sizes,
    Suite,
    batch_head_dim,
    few_heads,
)
from fulmen.runtime.architectures import kernels_run_on


def linear(schedule: str, backend: str = "auto") -> Callable[..., Tensor]:
    """linear_attention of q, k, v and, unless there is none, a decay."""

    def run(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> Tensor:
        return fulmen.linear_attention(q, k, v, log_decay=log_decay, scale=1.0, schedule=schedule, backend=backend)

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
                'head decay, schedule="recurrent"',
                (*QKV, "head"),
                linear("recurrent"),
                EXACT,
                fixed=("head",),
            ),
            Column(
                "LASD_P",
                'head decay, schedule="parallel"',
                (*QKV, "head"),
                linear("parallel"),
                EXACT,
                fixed=("head",),
            ),
            Column("LAND_P", 'no decay, schedule="parallel"', QKV, linear("parallel"), EXACT),
            Column("LASD_PL", 'learnable head decay, schedule="parallel"', (*QKV, "head"), linear("parallel"), EXACT),
            Column("LASD3_P", 'token decay, schedule="parallel"', (*QKV, "token"), linear("parallel"), EXACT),
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
                (*QKV, "head"),
                lightning2_parallel,
                EXACT,
                fixed=("head",),
                heads_first=True,
            ),
            Column(
                "LC",
                "Lightning Attention-2, one loop over chunks: lightning-attn on CUDA if installed, else "
                "lightning2_chunk_loop",
                (*QKV, "head"),
                _lightning2_chunk_loop,
                EXACT,
                fixed=("head",),
                heads_first=True,
            ),
            Column(
                "GLA_K",
                "channel decay: fla's chunk_gla on CUDA; on CPU our torch form of its algorithm",
                (*QKV, "channel"),
                _gla,
                EXACT,
                peer="fla",
            ),
            Column(
                "GLA_S_K",
                "token decay: fla's chunk_simple_gla on CUDA; on CPU its naive chunk form if fla is installed, "
                "else our torch form of its algorithm",
                (*QKV, "token"),
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
