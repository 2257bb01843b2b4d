"""Layers on Fulmen's operators, and the cache of their states (docs/nn.md)."""

from fulmen.nn.cache import LayerCache, StateCache
from fulmen.nn.gated_delta_net import GatedDeltaNet
from fulmen.nn.gated_linear_attention import GatedLinearAttention
from fulmen.nn.kimi_delta_attention import KimiDeltaAttention
from fulmen.nn.lightning_attention import LightningAttention
from fulmen.nn.linear import Linear
from fulmen.nn.mamba2 import Mamba2
from fulmen.nn.norms import RMSNorm
from fulmen.nn.output_gated_attention import OutputGatedAttention
from fulmen.nn.slopes import slopes
from fulmen.nn.tensor_product_attention import TensorProductAttention

__all__ = [
    "GatedDeltaNet",
    "GatedLinearAttention",
    "KimiDeltaAttention",
    "LayerCache",
    "LightningAttention",
    "Linear",
    "Mamba2",
    "OutputGatedAttention",
    "RMSNorm",
    "StateCache",
    "TensorProductAttention",
    "slopes",
]
