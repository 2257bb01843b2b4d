"""Lightning attention as in MiniMax's models: a decay that is set by the number of the head and of the layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from fulmen.nn.call import Call
from fulmen.nn.linear import Linear
from fulmen.nn.mixer import Mixer, check_heads
from fulmen.nn.norms import RMSNorm
from fulmen.nn.slopes import slopes
from fulmen.runtime.checks import check_count

# Of transformers' layer; what the operator does without.
_BLOCKS = ("query_decay", "key_decay", "diagonal_decay")


class LightningAttention(Mixer):
    """``out_proj(sigmoid(output_gate(x)) · norm(attention))``, q, k and v with SiLU.

    Loads the weights of transformers' MiniMaxLightningAttention.

    Args:
        hidden_size: of the tokens.
        num_heads: H. head_dim: D; None: ``hidden_size / num_heads``.
        layer, num_layers: which of how many, for :func:`fulmen.nn.slopes`.
        norm_eps: of the norm.
    """

    slope_rate: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 8,
        head_dim: int | None = None,
        *,
        layer: int = 0,
        num_layers: int = 1,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        check_count("hidden_size", hidden_size)
        check_count("num_heads", num_heads)
        if head_dim is None:
            check_heads(hidden_size=hidden_size, num_heads=num_heads)
            head_dim = hidden_size // num_heads
        check_count("head_dim", head_dim)
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, head_dim
        inner = num_heads * head_dim
        self.qkv_proj = Linear(hidden_size, 3 * inner, bias=False)
        self.output_gate = Linear(hidden_size, inner, bias=False)
        self.norm = RMSNorm(inner, norm_eps, gate="sigmoid")
        self.out_proj = Linear(inner, hidden_size, bias=False)
        self.layer, self.num_layers = layer, num_layers
        self.register_buffer("slope_rate", torch.empty(num_heads, 1, 1, dtype=torch.float32))
        self.register_load_state_dict_pre_hook(_without_blocks)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The slopes, which are no parameters but as lost on the way from the meta device as these."""
        self.slope_rate.copy_(slopes(self.num_heads, layer=self.layer, num_layers=self.num_layers)[:, None, None])

    def mix(self, x: Tensor, call: Call) -> Tensor:
        q, k, v = split_heads(silu(self.qkv_proj(x)), self.num_heads)
        attention = call.linear_attention(q, k, v, -self.slope_rate.flatten(), scale=1.0)
        return self.out_proj(self.norm(attention.flatten(-2), self.output_gate(x)))

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, heads={self.num_heads}, key size={self.head_dim}, value size={self.head_dim}"


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Views q, k, v ``[..., H, D]`` of ``[..., H · 3 D]``."""
    return qkv.unflatten(-1, (heads, 3, -1)).unbind(-2)


def _without_blocks(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    for name in _BLOCKS:
        state_dict.pop(prefix + name, None)
