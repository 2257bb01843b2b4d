"""The causal depthwise convolution over a few tokens that stands before most linear-attention layers."""

from fulmen.ops.causal_conv1d.api import causal_conv1d, causal_conv1d_step

__all__ = ["causal_conv1d", "causal_conv1d_step"]
