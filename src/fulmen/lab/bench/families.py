"""Small models of transformers with random weights, one for each family that `fulmen.integrations.transformers` knows.

Depth and vocabulary are cut down; what a layer is, and the ratios of its sizes, are the family's. A token goes to all
experts, of which there are two: a choice among them would be one that rounding could change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

LAYERS, VOCABULARY = 4, 8192
SEED = 0


@dataclass(frozen=True)
class Widths:
    """Sizes that follow from the hidden size."""

    hidden: int

    @property
    def head(self) -> int:
        """Channels of a head."""
        return 64 if self.hidden >= 512 else 16

    @property
    def state(self) -> int:
        return 2 * self.head

    @property
    def heads(self) -> int:
        """Of attention."""
        return self.hidden // self.head

    @property
    def inner_heads(self) -> int:
        """Of a mixer that is twice as wide."""
        return 2 * self.heads


def _attention(w: Widths) -> dict[str, Any]:
    """Of softmax attention, and of the layers after it."""
    return {
        "num_attention_heads": w.heads,
        "num_key_value_heads": w.heads // 2,
        "intermediate_size": 2 * w.hidden,
    }


def _mamba_named(w: Widths) -> dict[str, Any]:
    """As the hybrids name the sizes of their Mamba-2 mixers."""
    return {"mamba_n_heads": w.inner_heads, "mamba_d_head": w.head, "mamba_d_state": w.state} | _attention(w)


def _kinds(linear: str, softmax: str) -> list[str]:
    """Of the layers."""
    return [linear, linear, softmax, linear]


def _delta_named(w: Widths) -> dict[str, Any]:
    """As the families with a gated delta rule name theirs."""
    return {
        "intermediate_size": 2 * w.hidden,
        "num_attention_heads": w.heads // 2,
        "num_key_value_heads": w.heads // 4,
        "head_dim": 2 * w.head,
        "linear_key_head_dim": 2 * w.head,
        "linear_value_head_dim": 2 * w.head,
        "linear_num_key_heads": w.heads // 4,
        "linear_num_value_heads": w.heads // 2,
    }


# The prefix of its classes, and its config's sizes. A layer of softmax attention, where a family has it, is the third.
FAMILIES: dict[str, tuple[str, Callable[[Widths], dict[str, Any]]]] = {
    "Mamba2": (
        "Mamba2",
        lambda w: {"num_heads": w.inner_heads, "head_dim": w.head, "state_size": w.state, "n_groups": 1},
    ),
    "Bamba": ("Bamba", lambda w: _mamba_named(w) | {"attn_layer_indices": [2]}),
    "FalconH1": ("FalconH1", lambda w: _mamba_named(w) | {"mamba_d_ssm": 2 * w.hidden}),
    "GraniteMoeHybrid": (
        "GraniteMoeHybrid",
        lambda w: (
            _mamba_named(w)
            | {"layer_types": _kinds("mamba", "attention"), "attention_multiplier": w.head**-0.5}
            | {"num_local_experts": 2, "shared_intermediate_size": w.hidden, "intermediate_size": w.hidden // 2}
        ),
    ),
    "NemotronH": (
        "NemotronH",
        lambda w: (
            _attention(w)
            | {"layers_block_type": ["mamba", "mlp", "attention", "mamba"], "head_dim": w.head, "n_groups": 1}
            | {"mamba_num_heads": w.inner_heads, "mamba_head_dim": w.head, "ssm_state_size": w.state}
        ),
    ),
    "Zamba2": (
        "Zamba2",
        lambda w: {
            "layers_block_type": _kinds("mamba", "hybrid"),
            "n_mamba_heads": w.inner_heads,
            "mamba_d_state": w.state,
            "num_attention_heads": w.heads,
            "intermediate_size": 2 * w.hidden,
        },
    ),
    "MiniMax": (
        "MiniMax",
        lambda w: (
            _attention(w)
            | {"layer_types": _kinds("linear_attention", "full_attention"), "head_dim": w.head}
            | {"num_local_experts": 2, "intermediate_size": w.hidden}
        ),
    ),
    "Lfm2": (
        "Lfm2",
        lambda w: _attention(w) | {"layer_types": _kinds("conv", "full_attention"), "block_auto_adjust_ff_dim": False},
    ),
    "Lfm2Moe": (
        "Lfm2Moe",
        lambda w: (
            _attention(w)
            | {"layer_types": _kinds("conv", "full_attention"), "moe_intermediate_size": w.hidden // 2}
            | {"num_experts": 2, "num_experts_per_tok": 2}
        ),
    ),
    "Mamba": ("Mamba", lambda w: {"state_size": 16}),
    "Qwen3.5": ("Qwen3_5", lambda w: _delta_named(w) | {"layer_types": _kinds("linear_attention", "full_attention")}),
}


def model(family: str, hidden: int, dtype: torch.dtype = torch.float32) -> Any:
    """The same weights in every dtype: they are numbers of bfloat16."""
    import transformers

    name, sizes = FAMILIES[family]
    config = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    common = {"hidden_size": hidden, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    if "layers_block_type" in sizes(Widths(hidden)) and name == "NemotronH":
        del common["num_hidden_layers"]  # it follows from the kinds of the layers
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        made = getattr(transformers, f"{name}ForCausalLM")(config(**common, **sizes(Widths(hidden))))
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.ndim > 1:  # so large that each layer counts: as transformers begins, many hardly do
                    parameter.normal_(std=0.5 * parameter.shape[-1] ** -0.5)
                parameter.copy_(parameter.to(torch.bfloat16))
    return made.to(dtype).eval()
