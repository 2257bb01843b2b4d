"""Fulmen: linear-attention operators that are fast on whatever device the tensors are on."""

from fulmen.ops.causal_conv1d import causal_conv1d, causal_conv1d_step
from fulmen.ops.delta_rule import delta_rule, delta_rule_step
from fulmen.ops.linear_attention import chunk_states, linear_attention, linear_attention_step
from fulmen.ops.output_gate import output_gated_attention
from fulmen.ops.tpa import TPACache, tpa_decode
from fulmen.runtime.backends import Backend, backends

__version__ = "0.2.0"

__all__ = [
    "Backend",
    "TPACache",
    "__version__",
    "backends",
    "causal_conv1d",
    "causal_conv1d_step",
    "chunk_states",
    "delta_rule",
    "delta_rule_step",
    "linear_attention",
    "linear_attention_step",
    "output_gated_attention",
    "tpa_decode",
]


def __dir__() -> list[str]:
    return __all__
