"""The mixer of Mamba-2: convolution, scan, gated norm.

    h_t = exp(A dt_t) h_{t-1} + dt_t x_t B_tᵀ,   y_t = h_t C_t + D x_t

is linear attention with q = C, k = B, v = x · dt and the log-decay A · dt; h is the transpose of its state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fulmen
from fulmen.nn import native_scan
from fulmen.nn.call import Call
from fulmen.nn.gates import decay_rate, init_dt_bias_, step_size
from fulmen.nn.linear import Linear
from fulmen.nn.mixer import Mixer, check_heads
from fulmen.nn.norms import RMSNorm
from fulmen.nn.short_conv import ShortConv
from fulmen.runtime.checks import check_count
from fulmen.runtime.replay import replayed

UNLIMITED = (0.0, float("inf"))


class Mamba2(Mixer):
    """Loads the weights of transformers' Mamba2Mixer, BambaMixer and GraniteMoeHybridMambaLayer, and with as many
    norm_groups as num_groups those of NemotronHMamba2Mixer and Zamba2MambaMixer.

    Args:
        hidden_size: of the tokens.
        num_heads: H; None: as many as make H · head_dim twice hidden_size.
        head_dim: channels of x for each head, the value size.
        state_size: channels of B and C, the key size.
        num_groups: how many heads B and C have; each is shared by H / num_groups.
        conv_size: width of the convolution. conv_bias: whether it has a bias. bias: whether the projections do.
        time_step_limit: least and most of dt.
        norm_eps: of the norm. norm_groups: in how many groups of channels it is taken.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int | None = None,
        *,
        head_dim: int = 64,
        state_size: int = 128,
        num_groups: int = 1,
        conv_size: int = 4,
        conv_bias: bool = True,
        bias: bool = False,
        time_step_limit: tuple[float, float] = UNLIMITED,
        norm_eps: float = 1e-5,
        norm_groups: int = 1,
    ) -> None:
        super().__init__()
        sizes = {"head_dim": head_dim, "state_size": state_size, "num_groups": num_groups}
        for name, count in {"hidden_size": hidden_size, **sizes}.items():
            check_count(name, count)
        if num_heads is None:
            check_heads(**{"2 * hidden_size": 2 * hidden_size, "head_dim": head_dim})
            num_heads = 2 * hidden_size // head_dim
        check_count("num_heads", num_heads)
        check_heads(num_heads=num_heads, num_groups=num_groups)
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, head_dim
        self.state_size, self.num_groups, self.time_step_limit = state_size, num_groups, tuple(time_step_limit)
        inner = num_heads * head_dim
        self._convolved = inner, num_groups * state_size, num_groups * state_size
        channels = sum(self._convolved)
        self._projected = inner, channels, num_heads
        self.in_proj = Linear(hidden_size, sum(self._projected), bias=bias)
        self.conv1d = ShortConv(channels, conv_size, conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.D = nn.Parameter(torch.empty(num_heads))
        self.norm = RMSNorm(inner, norm_eps, gate="silu", gate_first=True, groups=norm_groups)
        self.out_proj = Linear(inner, hidden_size, bias=bias)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Of this module itself, as everywhere in torch: not of the modules in it."""
        init_dt_bias_(self.dt_bias)
        self.A_log.copy_(torch.arange(1.0, self.num_heads + 1).log())
        self.D.fill_(1.0)

    def mix(self, x: Tensor, call: Call) -> Tensor:
        tokens = x.shape[:-1]
        gate, channels, dt = self.in_proj(x).split_with_sizes(self._projected, dim=-1)
        x, B, C = self.conv1d(channels, call).split_with_sizes(self._convolved, dim=-1)
        x = x.view(*tokens, self.num_heads, self.head_dim)
        B, C = (y.view(*tokens, self.num_groups, self.state_size) for y in (B, C))
        dt = step_size(dt, self.dt_bias)
        if self.time_step_limit != UNLIMITED:
            dt = dt.clamp(*self.time_step_limit)
        rate = decay_rate(self.A_log)
        if call.walks_here:
            output = call.walk(scan, C, B, x, dt, log_decay=dt * rate, D=self.D)
        else:
            output = call.linear_attention(C, B, weighed(x, dt), dt * rate, scale=1.0)
            output = with_skip(output, x, self.D.unsqueeze(-1))
        return self.out_proj(self.norm(output.flatten(-2), gate))

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, heads={self.num_heads}, key size={self.state_size}, value size={self.head_dim}, "
            f"groups={self.num_groups}"
        )


@replayed
def scan(
    C: Tensor,
    B: Tensor,
    x: Tensor,
    dt: Tensor,
    *,
    log_decay: Tensor,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """All tokens: C and B ``[B, N, G, S]``, x ``[B, N, H, P]``, dt and log_decay ``[B, N, H]``, D ``[H]``. The output
    ``[B, N, H, P]``; with ``return_state`` a pair of it and the state ``[B, H, S, P]``."""
    if native_scan.takes(C, B, x, dt, log_decay, D, initial_state, cu_seqlens):
        return native_scan.scan(C, B, x, dt, log_decay, D, initial_state, cu_seqlens, return_state)
    options: Any = {"initial_state": initial_state, "return_state": return_state, "cu_seqlens": cu_seqlens}
    found = fulmen.linear_attention(C, B, weighed(x, dt), log_decay=log_decay, scale=1.0, **options)
    if D is not None:
        with_skip(found[0] if return_state else found, x, D.unsqueeze(-1))
    return found


def weighed(x: Tensor, dt: Tensor) -> Tensor:
    """x · dt ``[..., H, P]``, with one dt for each head, in x's dtype: the values."""
    return (x * dt.unsqueeze(-1)).to(x.dtype)


def with_skip(output: Tensor, x: Tensor, D: Tensor) -> Tensor:
    """``output + D x``, in one pass; output is overwritten."""
    return output.addcmul_(x, D.to(output.dtype))
