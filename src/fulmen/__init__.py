"""Fulmen: linear-attention operators that are fast on whatever device the tensors are on."""

from fulmen.backends import Backend, backends
from fulmen.linear_attention import chunk_states, linear_attention, linear_attention_step
from fulmen.output_gate import output_gated_attention
from fulmen.tpa import TPACache, tpa_decode

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "TPACache",
    "__version__",
    "backends",
    "chunk_states",
    "linear_attention",
    "linear_attention_step",
    "output_gated_attention",
    "tpa_decode",
]
