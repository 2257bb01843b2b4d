"""Linear attention without decay, its training above all (report "Lightning Attention-3")."""

from __future__ import annotations

from fulmen.lab.bench.softmax import exact_softmax, flash_attention_2, sdpa
from fulmen.lab.bench.suite import ATTENTION_INPUTS, Column, Preset, Sizes, Suite, batch_head_dim, few_heads
from fulmen.lab.bench.suites.lasd import EXACT, QKV, linear

LA3 = Suite(
    name="la3",
    about="linear attention without decay, forward and backward, against softmax attention",
    axis="n",
    baseline="PyTorch-SDPA",
    modes=("fwd", "bwd"),
    sections={
        "": (
            Column(
                "LA3-Chunked",
                'no decay, schedule="recompute": the backward recomputes in small tiles',
                QKV,
                linear("recompute"),
                EXACT,
            ),
            Column("LA3-NoDecay", 'no decay, schedule="loop": plain chunks', QKV, linear("loop"), EXACT),
            Column(
                "LA3-Original",
                'head decay, schedule="loop": plain chunks',
                (*QKV, "head"),
                linear("loop"),
                EXACT,
                fixed=("head",),
            ),
            Column(
                "FlashAttn-2",
                "softmax attention of the flash-attn package",
                QKV,
                flash_attention_2,
                exact_softmax,
                heads_first=True,
                growth=2,
                peer="flash_attn",
                cuda_only=True,
            ),
            Column(
                "PyTorch-SDPA",
                "softmax attention: torch scaled_dot_product_attention",
                QKV,
                sdpa,
                exact_softmax,
                heads_first=True,
                growth=2,
            ),
        )
    },
    inputs=ATTENTION_INPUTS,
    presets={
        "published": Preset((Sizes(4, 32, 64),), (1024, 2048, 4096, 8192)),
        "laptop": Preset((Sizes(1, 16, 64),), (256, 512, 1024, 2048, 4096, 8192)),
        "quick": Preset((Sizes(1, 8, 64),), (64, 256, 1024, 4096)),
    },
    check_sizes=few_heads,
    sizes_in_title=batch_head_dim,
)
