"""What the reports explain in words: the suites, their algorithms, and every column."""

from __future__ import annotations

from typing import NamedTuple


class Variant(NamedTuple):
    description: str
    pros: str
    cons: str


class SuiteText(NamedTuple):
    title: str
    subject: str  # what is compared, in one sentence
    algorithm: str  # its name
    formula: str
    complexity: tuple[str, ...]


_LINEAR = """\
Forward:  O[c] = Q[c] @ S[c-1] + intra_chunk_attention
where:    S[c] = decay(c) * S[c-1] + K[c]^T @ V[c]"""

SUITES = {
    "state": SuiteText(
        "Chunk States",
        "The states that enter every chunk of 128 tokens, with a decay for each channel: chunk after chunk, or all "
        "chunks at once.",
        "Chunk States",
        "S[c] = diag(e^a) S[c-1] diag(e^c) + K[c]^T @ V[c],  stored for every chunk",
        (
            "Loop: O(n), one program walks the chunks of a head",
            "Parallel: O(n), every chunk is summarised alone, then the summaries are folded: one more pass",
            "Memory: O(n / 128) states of D × E",
        ),
    ),
    "lasd": SuiteText(
        "Lightning Attention with Scalar Decay",
        "Lightning attention without decay, with a constant, a learnable and a per-token one, against softmax "
        "attention, the original Lightning Attention-2 and gated linear attention.",
        "Linear Attention with Decay",
        _LINEAR,
        (
            "Inter-chunk: O(n), one D × E state walks from chunk to chunk",
            "Intra-chunk: O(chunk²) for each chunk, a constant; O(n) in all",
            "**Overall: O(n)**, against O(n²) for softmax attention",
        ),
    ),
    "la3": SuiteText(
        "Lightning Attention-3 Comprehensive",
        "Lightning Attention-3 variants against softmax attention.",
        "Linear Attention",
        _LINEAR,
        (
            "Inter-chunk: O(n), one D × E state walks from chunk to chunk",
            "Intra-chunk: O(chunk²) for each chunk, a constant; O(n) in all",
            "**Overall: O(n)**, against O(n²) for softmax attention",
        ),
    ),
    "tpa_decode": SuiteText(
        "Tensor-Product Attention, Decoding",
        "One query token over a cache of M keys and values that are kept as factors.",
        "Tensor-Product Attention",
        "scores = (bk · bqᵀ) · aqᵀ ⊙ ak;  p = softmax(scores);  o = bvᵀ · (p ⊙ av)",
        (
            "Factorised: O(M · R · (D + H)) for each sample; keys and values are never built",
            "Naive: O(M · H · D) to build and read keys and values of every head",
            "Memory: the factors alone, M · (2 H + D + E) numbers, against 2 · M · H · D",
        ),
    ),
    "flao": SuiteText(
        "Linear Attention with an Output Gate",
        "o = g ⊙ (q · (kᵀv)), non-causal: autograd against a hand-written backward, and what that keeps.",
        "Output-Gated Linear Attention",
        "Forward:  O = G ⊙ (Q @ (K^T @ V))",
        (
            "O(n · D · E): two products for each head, and no n × n matrix",
            "cache: K^T V (D × E) and Q K^T V (n × E) are kept for the backward, or recomputed in it",
        ),
    ),
    "limits": SuiteText("The Limits of the Machine", "The kernels against what the machine can do.", "", "", ()),
}

_SOFTMAX = "O(n²) complexity"
_TORCH_AUTOGRAD = Variant("torch, gradients by autograd", "Nothing to maintain", "Keeps what autograd keeps")
_HAND_WRITTEN = Variant(
    "torch, hand-written backward", "Chooses what is kept for the backward", "Several passes over memory"
)

VARIANTS: dict[str, dict[str, Variant]] = {
    "state": {
        "GLA": Variant(
            "State function of flash-linear-attention (GPU), or its algorithm in torch", "Peer", "Decay on keys only"
        ),
        "LAVD_K": Variant(
            "chunk_states, loop, decay per key channel", "Reads k, v once", "Few programs when heads are few"
        ),
        "LAVD_KV": Variant("chunk_states, loop, decay per key and value channel", "As LAVD_K", "Two decays to read"),
        "LAVD_K_P": Variant(
            "chunk_states, parallel, decay per key channel", "Fills the card", "Second pass over the states"
        ),
        "LAVD_KV_P": Variant(
            "chunk_states, parallel, decay per key and value channel", "Fills the card", "Second pass over the states"
        ),
    },
    "lasd": {
        "LASD_R": Variant("Constant decay, token by token", "Exact order of the recurrence", "No matrix products"),
        "LASD_P": Variant(
            "Constant decay, chunks in parallel", "O(n), matrix products only", "One state for each segment"
        ),
        "LAND_P": Variant("No decay, chunks in parallel", "The least work", "Never forgets"),
        "LASD_PL": Variant(
            "Learnable constant decay, chunks in parallel", "Gradient of the decay", "More work in the backward"
        ),
        "LASD3_P": Variant(
            "Decay per token (Mamba-2), chunks in parallel", "Data-dependent decay", "Weights for each chunk"
        ),
        "Flash": Variant("flash-attn, or torch's softmax attention", "Well-optimised baseline", _SOFTMAX),
        "LP": Variant("Lightning Attention-2, parallel", "The original", "Slower than LASD_P in the published tables"),
        "LC": Variant("Lightning Attention-2, chunk loop", "The original, little memory", "Slow published backward"),
        "GLA_K": Variant(
            "Gated linear attention, decay per key channel", "Most expressive decay", "Decays as large as k"
        ),
        "GLA_S_K": Variant(
            "Gated linear attention, decay per token", "Peer of LASD3_P", "States stored for each chunk"
        ),
    },
    "la3": {
        "LA3-Chunked": Variant(
            "No decay, recompute-heavy backward in small tiles",
            "Fits small shared memories",
            "Reads more in the backward",
        ),
        "LA3-NoDecay": Variant("No decay, plain chunks", "Simple, fast", "Larger tiles in the backward"),
        "LA3-Original": Variant("Constant decay, plain chunks", "Forgets", "Weights for each chunk"),
        "FlashAttn-2": Variant("Flash Attention 2 (softmax attention)", "Well-optimised baseline", _SOFTMAX),
        "PyTorch-SDPA": Variant("PyTorch scaled_dot_product_attention", "Standard baseline", _SOFTMAX),
    },
    "tpa_decode": {
        "trb": Variant("Fused, one program for each sample", "Factors read once for all heads", "Few programs"),
        "trbh": Variant("Fused, one program for each sample and head", "Many programs", "Every head reads bk and bv"),
        "trbn": Variant(
            "Fused, slices of the cache, then a merge", "Fills the machine at any batch", "A second pass to merge"
        ),
        "to": Variant("Factorised, torch", "No kernel needed", "Scores go through memory"),
        "toc": Variant("Factorised, torch.compile", "Fewer passes than to", "Compilation"),
        "ton": Variant("Naive torch: builds q, k and v", "Simplest", "M · H · D numbers for keys and for values"),
        "tonc": Variant("Naive torch, torch.compile", "Fewer passes than ton", "Compilation; still builds k and v"),
    },
    "flao": {
        "Lao Tor": _TORCH_AUTOGRAD,
        "Lao Tor C": _TORCH_AUTOGRAD._replace(description="The same under torch.compile", cons="Compilation"),
        "Flao Tor": _HAND_WRITTEN,
        "Flao Tor C": _HAND_WRITTEN._replace(description="The same under torch.compile", cons="Compilation"),
        "Flao Tri": Variant("The fused kernel", "Each tensor is read once", "A kernel to maintain"),
    },
}


def variant(suite: str, column: str) -> Variant:
    return VARIANTS.get(suite, {}).get(column, Variant(column, "", ""))


def suite_text(suite: str) -> SuiteText:
    return SUITES.get(suite, SuiteText(suite, "", "", "", ()))
