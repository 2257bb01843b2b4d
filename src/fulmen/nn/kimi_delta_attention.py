"""Kimi Delta Attention: the delta rule with a decay for each channel of the keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fulmen.nn.call import Call
from fulmen.nn.gates import decay_rate, init_decay_rate_, init_dt_bias_, step_size
from fulmen.nn.linear import Linear
from fulmen.nn.mixer import Mixer
from fulmen.nn.norms import RMSNorm
from fulmen.nn.short_conv import ShortConv
from fulmen.runtime.checks import check_count


class ForgetGate(nn.Module):
    """The log-decays ``[..., H, D]``, from a projection of rank D."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.f_a_proj = Linear(hidden_size, head_dim, bias=False)
        self.f_b_proj = Linear(head_dim, num_heads * head_dim, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(num_heads * head_dim))
        self.A_log = nn.Parameter(torch.empty(1, 1, num_heads, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_dt_bias_(self.dt_bias)
        init_decay_rate_(self.A_log)

    def forward(self, x: Tensor) -> Tensor:
        steps = step_size(self.f_b_proj(self.f_a_proj(x)), self.dt_bias)
        return steps.unflatten(-1, (self.A_log.shape[2], -1)) * decay_rate(self.A_log.view(-1, 1))


class KimiDeltaAttention(Mixer):
    """``o_proj(norm(delta rule) · sigmoid(gate))``; q, k and v go through a convolution with SiLU.

    Loads the weights of transformers' KimiLinearDeltaAttention.

    Args:
        hidden_size: of the tokens.
        num_heads: H. head_dim: D and E; also the rank of the gates.
        conv_size: width of the convolution.
        norm_eps: of the norm.
    """

    def __init__(
        self, hidden_size: int, num_heads: int = 4, head_dim: int = 128, *, conv_size: int = 4, norm_eps: float = 1e-5
    ) -> None:
        super().__init__()
        for name, count in {"hidden_size": hidden_size, "num_heads": num_heads, "head_dim": head_dim}.items():
            check_count(name, count)
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, head_dim
        inner = num_heads * head_dim
        self.q_proj = Linear(hidden_size, inner, bias=False)
        self.k_proj = Linear(hidden_size, inner, bias=False)
        self.v_proj = Linear(hidden_size, inner, bias=False)
        self.conv1d = ShortConv(3 * inner, conv_size)
        self.forget_gate = ForgetGate(hidden_size, num_heads, head_dim)
        self.b_proj = Linear(hidden_size, num_heads, bias=False)
        self.g_a_proj = Linear(hidden_size, head_dim, bias=False)
        self.g_b_proj = Linear(head_dim, inner, bias=False)
        self.o_norm = RMSNorm(head_dim, norm_eps, gate="sigmoid")
        self.o_proj = Linear(inner, hidden_size, bias=False)

    def mix(self, x: Tensor, call: Call) -> Tensor:
        projected = {"q_conv": self.q_proj(x), "k_conv": self.k_proj(x), "v_conv": self.v_proj(x)}
        heads = *x.shape[:-1], self.num_heads, self.head_dim
        q, k, v = (y.view(heads) for y in self.conv1d.of_parts(projected, call))
        gate = self.g_b_proj(self.g_a_proj(x)).view(heads)
        beta = self.b_proj(x).sigmoid()
        return self.o_proj(self.o_norm(call.delta_rule(q, k, v, beta, self.forget_gate(x)), gate).flatten(-2))

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, heads={self.num_heads}, key size={self.head_dim}, value size={self.head_dim}"
