"""What the reports explain in words: the suites, their algorithms, and the merits of every column."""

from __future__ import annotations

from typing import NamedTuple

from fulmen.lab.bench.suites import SUITES


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

_TEXTS = {
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
}

_SOFTMAX = "O(n²) complexity"
_STATES = "One more pass over the states"
_COMPILED = "Compilation"

# Pros and cons of every column.
_MERITS = {
    "state": {
        "GLA": ("Peer", "Decay on keys only"),
        "LAVD_K": ("Reads k and v once", "Few programs where heads are few"),
        "LAVD_KV": ("Reads k and v once", "Two decays to read"),
        "LAVD_K_P": ("Fills the machine", _STATES),
        "LAVD_KV_P": ("Fills the machine", _STATES),
    },
    "lasd": {
        "LASD_R": ("The order of the recurrence", "No matrix products"),
        "LASD_P": ("O(n), matrix products only", _STATES),
        "LAND_P": ("The least work", "Never forgets"),
        "LASD_PL": ("Gradient of the decay", "More work in the backward"),
        "LASD3_P": ("Decay depends on the token", "Weights for each chunk"),
        "Flash": ("Well-optimised baseline", _SOFTMAX),
        "LP": ("The original algorithm", "Constant decay only"),
        "LC": ("The original algorithm, no stored states", "Parallel over heads only"),
        "GLA_K": ("A decay for each channel", "Decays as large as k"),
        "GLA_S_K": ("Peer of LASD3_P", "Stores a state for each chunk"),
    },
    "la3": {
        "LA3-Chunked": ("Fits small shared memories", "Reads more in the backward"),
        "LA3-NoDecay": ("Simple, fast", "Larger tiles in the backward"),
        "LA3-Original": ("Forgets", "Weights for each chunk"),
        "FlashAttn-2": ("Well-optimised baseline", _SOFTMAX),
        "PyTorch-SDPA": ("Standard baseline", _SOFTMAX),
    },
    "tpa_decode": {
        "trb": ("Factors are read once for all heads", "Few programs"),
        "trbh": ("Many programs", "Every head reads bk and bv"),
        "trbn": ("Fills the machine at any batch", "A second pass to merge"),
        "to": ("No kernel needed", "Scores go through memory"),
        "toc": ("Fewer passes over memory than to", _COMPILED),
        "ton": ("Simplest", "Builds k and v of every head"),
        "tonc": ("Fewer passes over memory than ton", f"{_COMPILED}; builds k and v of every head"),
    },
    "flao": {
        "Lao Tor": ("Nothing to maintain", "Keeps what autograd keeps"),
        "Lao Tor C": ("Fewer passes over memory", _COMPILED),
        "Flao Tor": ("Chooses what is kept for the backward", "Several passes over memory"),
        "Flao Tor C": ("Chooses what is kept, fewer passes", _COMPILED),
        "Flao Tri": ("Each tensor is read once", "A kernel to maintain"),
    },
}


def variant(suite: str, column: str) -> Variant:
    """A column that is not known any more has its name for a description."""
    columns = SUITES[suite].columns if suite in SUITES else []
    about = next((known.about for known in columns if known.name == column), column)
    return Variant(about, *_MERITS.get(suite, {}).get(column, ("", "")))


def suite_text(suite: str) -> SuiteText:
    return _TEXTS.get(suite, SuiteText(suite, "", "", "", ()))
