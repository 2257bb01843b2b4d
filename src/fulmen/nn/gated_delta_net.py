"""Gated DeltaNet: the delta rule with one decay for each token and head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fulmen.nn.call import Call
from fulmen.nn.gates import decay_rate, init_decay_rate_, init_dt_bias_, step_size
from fulmen.nn.linear import Linear
from fulmen.nn.mixer import Mixer, check_heads
from fulmen.nn.norms import RMSNorm
from fulmen.nn.short_conv import ShortConv
from fulmen.runtime.checks import check_count


class GatedDeltaNet(Mixer):
    """``out_proj(norm(delta rule) · SiLU(in_proj_z(x)))``; q, k and v go through a convolution with SiLU.

    Loads the weights of transformers' Qwen3_5GatedDeltaNet, and of Qwen3NextGatedDeltaNet, whose projections have other
    rows side by side.

    Args:
        hidden_size: of the tokens.
        num_heads: of v, H. num_key_heads: of q and k, each shared by H / num_key_heads; None: H.
        key_size, value_size: D and E, of a head.
        conv_size: width of the convolution.
        norm_eps: of the norm.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        *,
        num_key_heads: int | None = None,
        key_size: int = 128,
        value_size: int = 128,
        conv_size: int = 4,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        num_key_heads = num_heads if num_key_heads is None else num_key_heads
        sizes = {"num_heads": num_heads, "num_key_heads": num_key_heads, "key_size": key_size, "value_size": value_size}
        for name, count in {"hidden_size": hidden_size, **sizes}.items():
            check_count(name, count)
        check_heads(num_heads=num_heads, num_key_heads=num_key_heads)
        self.hidden_size, self.num_heads, self.num_key_heads = hidden_size, num_heads, num_key_heads
        self.key_size, self.value_size = key_size, value_size
        keys, values = num_key_heads * key_size, num_heads * value_size
        self._convolved = keys, keys, values
        self.in_proj_qkv = Linear(hidden_size, 2 * keys + values, bias=False)
        self.in_proj_z = Linear(hidden_size, values, bias=False)
        self.in_proj_b = Linear(hidden_size, num_heads, bias=False)
        self.in_proj_a = Linear(hidden_size, num_heads, bias=False)
        self.conv1d = ShortConv(2 * keys + values, conv_size)
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.norm = RMSNorm(value_size, norm_eps, gate="silu")
        self.out_proj = Linear(values, hidden_size, bias=False)
        self.register_load_state_dict_pre_hook(_from_qwen3_next)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Of this module itself, as everywhere in torch: not of the modules in it."""
        init_dt_bias_(self.dt_bias)
        init_decay_rate_(self.A_log)

    def mix(self, x: Tensor, call: Call) -> Tensor:
        q, k, v = self.conv1d(self.in_proj_qkv(x), call).split_with_sizes(self._convolved, dim=-1)
        keys = *x.shape[:-1], self.num_key_heads, self.key_size
        values = *x.shape[:-1], self.num_heads, self.value_size
        beta = self.in_proj_b(x).sigmoid()
        log_decay = step_size(self.in_proj_a(x), self.dt_bias) * decay_rate(self.A_log)
        output = call.delta_rule(q.view(keys), k.view(keys), v.view(values), beta, log_decay)
        return self.out_proj(self.norm(output, self.in_proj_z(x).view(values)).flatten(-2))

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, heads={self.num_heads}, key heads={self.num_key_heads}, key size={self.key_size}, "
            f"value size={self.value_size}"
        )


def _from_qwen3_next(module: GatedDeltaNet, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Qwen3-Next has q, k, v, z of a key head side by side, and b, a. Here each is by itself, and q, k and v come out
    of a product as the convolution takes them."""
    shared = module.num_heads // module.num_key_heads
    parts = {
        "in_proj_qkvz": [module.key_size, module.key_size, shared * module.value_size, shared * module.value_size],
        "in_proj_ba": [shared, shared],
    }
    for name, sizes in parts.items():
        weight = state_dict.pop(f"{prefix}{name}.weight", None)
        if weight is None:
            continue
        rows = [x.flatten(0, 1) for x in weight.unflatten(0, (module.num_key_heads, -1)).split(sizes, dim=1)]
        ours = (torch.cat(rows[:3]), rows[3]) if name == "in_proj_qkvz" else rows
        named = ("in_proj_qkv", "in_proj_z") if name == "in_proj_qkvz" else ("in_proj_b", "in_proj_a")
        for target, value in zip(named, ours, strict=True):
            state_dict[f"{prefix}{target}.weight"] = value
