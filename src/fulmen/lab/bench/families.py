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


def _experts(w: Widths) -> dict[str, Any]:
    return {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": w.hidden // 2}


def _delta_named(w: Widths) -> dict[str, Any]:
    """As the families with a gated delta rule name theirs."""
    return {
        "layer_types": _kinds("linear_attention", "full_attention"),
        "intermediate_size": 2 * w.hidden,
        "num_attention_heads": w.heads // 2,
        "num_key_value_heads": w.heads // 4,
        "head_dim": 2 * w.head,
        "linear_key_head_dim": 2 * w.head,
        "linear_value_head_dim": 2 * w.head,
        "linear_num_key_heads": w.heads // 4,
        "linear_num_value_heads": w.heads // 2,
    }


def _delta_experts(w: Widths) -> dict[str, Any]:
    return _delta_named(w) | _experts(w) | {"shared_expert_intermediate_size": w.hidden // 2}


def _kimi_named(w: Widths) -> dict[str, Any]:
    """As the families with Kimi delta attention name theirs; their softmax attention has latent keys and values."""
    return {
        "layer_types": _kinds("linear_attention", "full_attention"),
        "mlp_layer_types": ["dense"] * LAYERS,
        "intermediate_size": 2 * w.hidden,
        "num_attention_heads": w.heads // 2,
        "num_key_value_heads": w.heads // 2,
        "linear_head_dim": 2 * w.head,
        "linear_num_heads": w.heads // 2,
        "kv_lora_rank": 2 * w.head,
        "qk_rope_head_dim": w.head // 2,
        "qk_nope_head_dim": w.head,
        "v_head_dim": w.head,
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
        lambda w: _attention(w) | _experts(w) | {"layer_types": _kinds("conv", "full_attention")},
    ),
    "Mamba": ("Mamba", lambda w: {"state_size": 16}),
    "FalconMamba": ("FalconMamba", lambda w: {"state_size": 16}),
    "Jamba": (
        "Jamba",
        lambda w: _attention(w) | _experts(w) | {"attn_layer_period": LAYERS, "attn_layer_offset": 2},
    ),
    "Zamba": (
        "Zamba",
        lambda w: {
            "layers_block_type": ["linear_attention", "hybrid"] * (LAYERS // 2),  # hybrids share weights: at least two
            "num_attention_heads": w.heads,
            "num_key_value_heads": w.heads,
            "intermediate_size": 2 * w.hidden,
        },
    ),
    "Inkling": (
        "Inkling",
        lambda w: (
            _attention(w)
            | {"head_dim": w.head, "swa_head_dim": w.head, "mlp_layer_types": ["dense"] * LAYERS}
            | {"swa_num_attention_heads": w.heads, "swa_num_key_value_heads": w.heads // 2, "d_rel": w.head // 4}
            | {"rel_extent": 1024, "logits_mup_width_multiplier": 1.0}
        ),
    ),
    "Qwen3.5": ("Qwen3_5", _delta_named),
    "Qwen3.5-MoE": ("Qwen3_5Moe", _delta_experts),
    "Qwen3Next": ("Qwen3Next", _delta_experts),
    "Qwen4-Exp": (
        "Qwen4Exp",
        lambda w: (
            _delta_experts(w)
            | {"hc_lowrank": w.head, "hc_count": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1}
            | {"indexer_head_dim": 2 * w.head, "indexer_budget": 2048, "indexer_compress_ratio": 4}
        ),
    ),
    "OlmoHybrid": ("OlmoHybrid", _delta_named),
    "KimiLinear": ("KimiLinear", _kimi_named),
    "BailingHybrid": (
        "BailingHybrid",
        lambda w: _kimi_named(w) | {"head_dim": w.head, "n_group": 1, "topk_group": 1},
    ),
}


def model(family: str, hidden: int, dtype: torch.dtype = torch.float32) -> Any:
    """The same weights in every dtype: they are numbers of bfloat16."""
    import transformers

    name, sizes = FAMILIES[family]
    config = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    common = {"hidden_size": hidden, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "pad_token_id": 0}
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
