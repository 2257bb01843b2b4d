"""Output-gated linear attention, without causality: g ⊙ (q·(kᵀv))."""

from fulmen.ops.output_gate.api import output_gated_attention

__all__ = ["output_gated_attention"]
