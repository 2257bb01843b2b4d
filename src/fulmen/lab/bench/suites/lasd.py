"""Causal linear attention with scalar decays against softmax attention and its relatives (report "Lightning Attention
with Scalar Decay")."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from fulmen.lab.baselines.gla import gla, simple_gla
from fulmen.lab.baselines.lightning2 import lightning2_chunk_loop, lightning2_parallel
from fulmen.lab.bench.linear_attention import (
    CHANNEL,
    COMPLEXITY,
    FORMULA,
    HEAD,
    INPUTS,
    KERNELS,
    NONE,
    TOKEN,
    attention_column,
    few_heads,
    linear,
)
from fulmen.lab.bench.owners import Owner, rendered, theirs
from fulmen.lab.bench.peers import one_file, peer, why_missing
from fulmen.lab.bench.softmax import SDPA_BY_TOKEN, flash, flash_attn_runs_on, softmax_column
from fulmen.lab.bench.suite import PUBLISHED_LENGTHS, Preset, Sizes, Suite, Text
from fulmen.runtime.architectures import kernels_run_on


def _lightning_attn_runs_on(device: torch.device) -> bool:
    return kernels_run_on(device) and not why_missing("lightning_attn")


def _lightning2_chunk_loop(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    if _lightning_attn_runs_on(q.device):
        return peer("lightning_attn.ops.lightning_attn_func")(q, k, v, -decay)
    return lightning2_chunk_loop(q, k, v, decay)


def _gla(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    if not q.is_cuda:
        return gla(q, k, v, decay)
    return peer("fla.ops.gla.chunk_gla")(q, k, v, decay, scale=1.0)[0]


def _simple_gla(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    if q.is_cuda:
        return peer("fla.ops.simple_gla.chunk_simple_gla")(q, k, v, decay, scale=1.0)[0]
    if naive := _naive_simple_gla():
        return naive.naive_chunk_simple_gla(q, k, v, decay, scale=1.0)[0].to(q.dtype)
    return simple_gla(q, k, v, decay)


def _naive_simple_gla() -> ModuleType | None:
    return one_file("fla", "ops/simple_gla/naive.py")


def _mamba2(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """Mamba-2 has dt · A for a log-decay, and dt · x for a value."""
    scan, dt, A = peer("transformers.models.mamba2.modeling_mamba2.mamba2_chunk_scan"), -decay, decay.new_tensor(-1.0)
    found = scan(v / dt[..., None], dt, A.expand(v.shape[2]), k, q, chunk_size=256)
    return (found[0] if isinstance(found, tuple) else found).to(v.dtype)


SUITE = Suite(
    name="lasd",
    about="causal linear attention with scalar decays, against softmax attention and others",
    text=Text(
        title="Lightning Attention with Scalar Decay",
        subject="Lightning attention without decay, with a head decay (fixed or learnable) and with a token decay, "
        "against softmax attention, the original Lightning Attention-2 and gated linear attention.",
        algorithm="Linear Attention with Decay",
        formula=FORMULA,
        complexity=COMPLEXITY,
    ),
    axis="n",
    baseline="Flash",
    modes=("fwd", "bwd"),
    sections={
        "": (
            attention_column(
                "LASD_R",
                "Fulmen, head decay, recurrent",
                'head decay, schedule="recurrent"',
                pros="The order of the recurrence",
                cons="No matrix products",
                decays=HEAD,
                learnable=False,
                function=linear("recurrent"),
            ),
            attention_column(
                "LASD_P",
                "Fulmen, head decay",
                'head decay, schedule="parallel"',
                pros="O(n), matrix products only",
                cons="One more pass over the states",
                decays=HEAD,
                learnable=False,
                function=linear("parallel"),
            ),
            attention_column(
                "LAND_P",
                "Fulmen, no decay",
                'no decay, schedule="parallel"',
                pros="The least work",
                cons="Never forgets",
                decays=NONE,
                function=linear("parallel"),
            ),
            attention_column(
                "LASD_PL",
                "Fulmen, learnable head decay",
                'learnable head decay, schedule="parallel"',
                pros="Gradient of the decay",
                cons="More work in the backward",
                decays=HEAD,
                function=linear("parallel"),
            ),
            attention_column(
                "LASD3_P",
                "Fulmen, token decay",
                'token decay, schedule="parallel"',
                pros="Decay depends on the token",
                cons="Weights for each chunk",
                decays=TOKEN,
                function=linear("parallel"),
            ),
            softmax_column(
                "Flash",
                "Softmax attention",
                "softmax attention: flash-attn on CUDA if installed, else the flash kernel of torch SDPA",
                pros="Well-optimised baseline",
                function=flash,
                owner=lambda device: Owner("flash_attn" if flash_attn_runs_on(device) else "torch"),
            ),
            attention_column(
                "LP",
                "Lightning Attention-2, parallel",
                "Lightning Attention-2, all blocks in parallel: lightning2_parallel",
                pros="The original algorithm",
                cons="Head decay only",
                decays=HEAD,
                learnable=False,
                function=lightning2_parallel,
                owner=rendered("lightning_attn"),
                heads_first=True,
            ),
            attention_column(
                "LC",
                "Lightning Attention-2, loop",
                "Lightning Attention-2, one loop over chunks: lightning-attn on CUDA if installed, else "
                "lightning2_chunk_loop",
                pros="The original algorithm, no stored states",
                cons="Parallel over heads only",
                decays=HEAD,
                learnable=False,
                function=_lightning2_chunk_loop,
                owner=lambda device: Owner("lightning_attn", not _lightning_attn_runs_on(torch.device(device))),
                heads_first=True,
            ),
            attention_column(
                "GLA_K",
                "GLA",
                "channel decay: fla's chunk_gla on CUDA; on CPU our torch form of its algorithm",
                pros="A decay for each channel",
                cons="Decays as large as k",
                decays=CHANNEL,
                function=_gla,
                owner=rendered("fla", on_cpu_only=True),
                peer="fla",
            ),
            attention_column(
                "GLA_S_K",
                "Simple GLA",
                "token decay: fla's chunk_simple_gla on CUDA; on CPU its naive chunk form if fla is installed, "
                "else our torch form of its algorithm",
                pros="Peer of LASD3_P",
                cons="Stores a state for each chunk",
                decays=TOKEN,
                function=_simple_gla,
                owner=lambda device: Owner("fla", device == "cpu" and _naive_simple_gla() is None),
                peer="fla",
            ),
            # Not published: what else a user has.
            attention_column(
                "Mamba2",
                "transformers, Mamba-2's scan",
                "token decay: mamba2_chunk_scan of transformers, with v divided by what it is multiplied with",
                pros="What models run without kernels",
                cons="Many copies in torch",
                decays=TOKEN,
                function=_mamba2,
                owner=theirs("transformers"),
                needs="transformers",
            ),
            SDPA_BY_TOKEN,
        )
    },
    inputs=INPUTS,
    presets={
        "published": Preset((Sizes(4, 32, 128), Sizes(1, 16, 128)), PUBLISHED_LENGTHS),
        "laptop": Preset((Sizes(1, 16, 128),), PUBLISHED_LENGTHS[:6]),
        "quick": Preset((Sizes(1, 4, 128),), (64, 256, 1024, 4096)),
    },
    kernels=KERNELS,
    check_sizes=few_heads,
)
