"""Linear attention with no, constant, learnable, per-token and per-channel decay."""

from fulmen.ops.linear_attention.api import chunk_states, linear_attention, linear_attention_step

__all__ = ["chunk_states", "linear_attention", "linear_attention_step"]
