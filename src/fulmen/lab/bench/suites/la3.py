"""Linear attention without decay, its training above all (report "Lightning Attention-3")."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fulmen.lab.bench.linear_attention import (
    COMPLEXITY,
    FORMULA,
    HEAD,
    INPUTS,
    KERNELS,
    NONE,
    attention_column,
    few_heads,
    linear,
)
from fulmen.lab.bench.owners import theirs
from fulmen.lab.bench.softmax import SDPA_BY_TOKEN, flash_attention_2, sdpa, softmax_column
from fulmen.lab.bench.suite import Preset, Sizes, Suite, Text


def _by_length(tables: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The report has Markdown tables, most with a kernel in each row, and no titles; and some that hold no figures."""
    printed = {table["heading"]: table for table in tables}
    for heading, what in (("Summary", "speed-both"), ("Speedup vs SDPA", "speedup-both")):
        lengths, kernels = printed[heading]["columns"][1:], printed[heading]["rows"]
        cells = [
            (n, kernel, figure) for kernel, *figures in kernels for n, figure in zip(lengths, figures, strict=True)
        ]
        yield _titled(heading, what, cells, section="Summary")
    detailed = printed["Detailed Results"]["rows"]
    for position, what in enumerate(("speed-fwd", "speed-bwd", "speed-both", "speedup-both"), start=2):
        yield _titled("Detailed Results", what, [(row[1], row[0], row[position]) for row in detailed])
    cells = []
    for n, chunked, softmax, _ in printed["Memory Efficiency"]["rows"]:
        cells += [(n, "LA3-Chunked", chunked), (n, "PyTorch-SDPA", softmax)]
    yield _titled("Memory Efficiency", "memory-both", cells)


def _titled(heading: str, what: str, cells: list[tuple[str, str, str]], section: str = "") -> dict[str, Any]:
    """From ``("N=1024", "**LA3-Chunked**", "**1.69x**")`` and the like: length, kernel and figure as printed."""
    rows: dict[str, dict[str, str]] = {}
    for n, kernel, figure in cells:
        rows.setdefault(n.removeprefix("N="), {})[kernel.strip("*")] = figure.strip("*").rstrip("xmsMB ")
    return {
        "heading": heading,
        "section": section,
        "title": f"la3-{what}-batch4-head32-dim64-bf16",
        "axis": "n",
        "columns": list(next(iter(rows.values()))),
        "rows": [[n, *figures.values()] for n, figures in rows.items()],
    }


SUITE = Suite(
    name="la3",
    about="linear attention without decay, forward and backward, against softmax attention",
    text=Text(
        title="Lightning Attention-3 Comprehensive",
        subject="Lightning Attention-3 variants against softmax attention.",
        algorithm="Linear Attention",
        formula=FORMULA,
        complexity=COMPLEXITY,
    ),
    axis="n",
    baseline="PyTorch-SDPA",
    modes=("fwd", "bwd"),
    sections={
        "": (
            attention_column(
                "LA3-Chunked",
                "Fulmen, recomputing backward",
                'no decay, schedule="recompute": the backward recomputes in small tiles',
                pros="Fits small shared memories",
                cons="Reads more in the backward",
                decays=NONE,
                function=linear("recompute"),
            ),
            attention_column(
                "LA3-NoDecay",
                "Fulmen, no decay",
                'no decay, schedule="loop": plain chunks',
                pros="Simple, fast",
                cons="Larger tiles in the backward",
                decays=NONE,
                function=linear("loop"),
            ),
            attention_column(
                "LA3-Original",
                "Fulmen, head decay",
                'head decay, schedule="loop": plain chunks',
                pros="Forgets",
                cons="Weights for each chunk",
                decays=HEAD,
                learnable=False,
                function=linear("loop"),
            ),
            softmax_column(
                "FlashAttn-2",
                "FlashAttention-2",
                "softmax attention of the flash-attn package",
                pros="Well-optimised baseline",
                function=flash_attention_2,
                owner=theirs("flash_attn"),
                peer="flash_attn",
                cuda_only=True,
            ),
            softmax_column(
                "PyTorch-SDPA",
                "Softmax attention of torch",
                "softmax attention: torch scaled_dot_product_attention",
                pros="Standard baseline",
                function=sdpa,
                owner=theirs("torch"),
            ),
            SDPA_BY_TOKEN,  # not published
        )
    },
    inputs=INPUTS,
    presets={
        "published": Preset((Sizes(4, 32, 64),), (1024, 2048, 4096, 8192)),
        "laptop": Preset((Sizes(1, 16, 64),), (256, 512, 1024, 2048, 4096, 8192)),
        "quick": Preset((Sizes(1, 8, 64),), (64, 256, 1024, 4096)),
    },
    kernels=KERNELS,
    check_sizes=few_heads,
    by_length=_by_length,
)
