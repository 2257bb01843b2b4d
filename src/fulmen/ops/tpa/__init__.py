"""Tensor-product attention: decoding one token over keys and values that are kept as factors."""

from fulmen.ops.tpa.api import tpa_decode
from fulmen.ops.tpa.cache import TPACache

__all__ = ["TPACache", "tpa_decode"]
