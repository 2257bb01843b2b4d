"""Gated linear attention (GLA): a decay for each channel of the keys, computed from the token."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from fulmen.nn.call import Call
from fulmen.nn.linear import Linear
from fulmen.nn.mixer import Mixer, check_heads
from fulmen.nn.norms import RMSNorm
from fulmen.nn.short_conv import ShortConv
from fulmen.runtime.checks import check_count
from fulmen.runtime.tensors import at_least_float32


class GatedLinearAttention(Mixer):
    """``o_proj(norm(attention) · SiLU(g_proj(x)))``; log-decays are ``logsigmoid(gk_proj(x)) / gate_logit_normalizer``.

    Parameters are named as in flash-linear-attention's layer.

    Args:
        hidden_size: of the tokens.
        num_heads: H.
        expand_k, expand_v: what q and k, and v, have of hidden_size: H · D and H · E.
        conv_size: width of a convolution of q, k and v; None: there is none.
        conv_bias: whether it has a bias.
        gate_low_rank_dim: rank of gk_proj.
        gate_logit_normalizer: the larger, the slower the decay.
        norm_eps: of the norm.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        *,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        conv_size: int | None = None,
        conv_bias: bool = False,
        gate_low_rank_dim: int = 16,
        gate_logit_normalizer: float = 16.0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        check_count("hidden_size", hidden_size)
        check_count("num_heads", num_heads)
        keys, values = int(hidden_size * expand_k), int(hidden_size * expand_v)
        check_heads(**{"hidden_size * expand_k": keys, "num_heads": num_heads})
        check_heads(**{"hidden_size * expand_v": values, "num_heads": num_heads})
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.key_size, self.value_size = keys // num_heads, values // num_heads
        self.gate_logit_normalizer = gate_logit_normalizer
        self.q_proj = Linear(hidden_size, keys, bias=False)
        self.k_proj = Linear(hidden_size, keys, bias=False)
        self.v_proj = Linear(hidden_size, values, bias=False)
        self.g_proj = Linear(hidden_size, values, bias=False)
        self.gk_proj = nn.Sequential(
            Linear(hidden_size, gate_low_rank_dim, bias=False), Linear(gate_low_rank_dim, keys)
        )
        self.q_conv1d = None if conv_size is None else ShortConv(keys, conv_size, conv_bias)
        self.k_conv1d = None if conv_size is None else ShortConv(keys, conv_size, conv_bias)
        self.v_conv1d = None if conv_size is None else ShortConv(values, conv_size, conv_bias)
        self.g_norm_swish_gate = RMSNorm(self.value_size, norm_eps, gate="silu")
        self.o_proj = Linear(values, hidden_size, bias=False)

    def mix(self, x: Tensor, call: Call) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.q_conv1d is not None and self.k_conv1d is not None and self.v_conv1d is not None:
            q = self.q_conv1d(q, call, "q_conv")
            k = self.k_conv1d(k, call, "k_conv")
            v = self.v_conv1d(v, call, "v_conv")
        log_decay = logsigmoid(at_least_float32(self.gk_proj(x))).div_(self.gate_logit_normalizer)
        keys = *x.shape[:-1], self.num_heads, self.key_size
        values = *x.shape[:-1], self.num_heads, self.value_size
        attention = call.linear_attention(q.view(keys), k.view(keys), v.view(values), log_decay.view(keys))
        return self.o_proj(self.g_norm_swish_gate(attention, self.g_proj(x).view(values)).flatten(-2))

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, heads={self.num_heads}, key size={self.key_size}, value size={self.value_size}"
