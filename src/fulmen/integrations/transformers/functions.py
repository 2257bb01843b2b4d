"""Which functions of transformers' files are ours, and which we leave alone.

One line here covers a function in every model that calls it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fulmen.integrations.transformers import convolution, delta_rule, mamba2, minimax, norms

OURS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        convolution.causal_conv1d_fn,
        convolution.causal_conv1d_update,
        mamba2.mamba2_chunk_scan,
        mamba2.mamba2_selective_state_update,
        mamba2.mamba2_split_conv1d_scan_combined,
        delta_rule.torch_chunk_gated_delta_rule,
        delta_rule.torch_recurrent_gated_delta_rule,
        delta_rule.chunk_kimi_delta_attention,
        delta_rule.recurrent_kimi_delta_attention,
    )
}

# Whole forwards, by the name of their class: a recurrence that no function has, and norms.
OUR_FORWARDS: Mapping[str, Callable[..., Any]] = {
    "MiniMaxLightningAttention": minimax.lightning_attention,
    **dict.fromkeys(
        (
            "BailingHybridRMSNorm",
            "BambaRMSNorm",
            "FalconH1RMSNorm",
            "FalconMambaRMSNorm",
            "Glm5NextTextRMSNorm",
            "GraniteMoeHybridRMSNorm",
            "InklingRMSNorm",
            "JambaRMSNorm",
            "KimiLinearRMSNorm",
            "Lfm2MoeRMSNorm",
            "Lfm2RMSNorm",
            "Mamba2RMSNorm",
            "MambaRMSNorm",
            "MiniMaxRMSNorm",
            "Zamba2RMSNorm",
            "ZambaRMSNorm",
        ),
        norms.rms_norm,
    ),
    **dict.fromkeys(("NemotronHRMSNorm", "OlmoHybridRMSNorm"), norms.rms_norm_in_dtype),
    **dict.fromkeys(
        ("Qwen3NextRMSNorm", "Qwen3_5MoeRMSNorm", "Qwen3_5RMSNorm", "Qwen4ExpTextRMSNorm"), norms.rms_norm_from_one
    ),
    **dict.fromkeys(
        (
            "BambaRMSNormGated",
            "GraniteMoeHybridRMSNormGated",
            "MambaRMSNormGated",
            "NemotronHRMSNormGated",
            "Zamba2RMSNormGated",
        ),
        norms.rms_norm_gated,
    ),
    **dict.fromkeys(
        (
            "BailingHybridRMSNormGated",
            "Glm5NextTextRMSNormGated",
            "KimiLinearRMSNormGated",
            "OlmoHybridRMSNormGated",
            "Qwen3NextRMSNormGated",
            "Qwen3_5MoeRMSNormGated",
            "Qwen3_5RMSNormGated",
            "Qwen4ExpTextRMSNormGated",
        ),
        norms.rms_norm_then_gate,
    ),
}

_MAMBA1 = "Mamba-1's recurrence: Fulmen has no operator for it"
LEFT_ALONE: Mapping[str, str] = {
    "mamba_selective_scan": _MAMBA1,
    "mamba_selective_state_update": _MAMBA1,
    "mamba_inner_fn": _MAMBA1,
}


# Attributes of a cache that a forward uses which carries a state from token to token.
KEEPS_A_STATE = {"update_recurrent_state", "update_conv_state"}


def why_left_alone(name: str, function: Any) -> str:
    """Of a function that a mixer calls and that is not ours; empty: it is nothing that we would compute."""
    if name in OURS:
        return "takes other arguments than Fulmen knows"
    return LEFT_ALONE.get(name, "Fulmen does not know it" if _is_dispatched(function) else "")


def _is_dispatched(value: Any) -> bool:
    """Whether transformers may serve this function from a package or a kernel: what a mixer's sequences go through.
    (A rotary embedding may be served from a kernel too. It does not mix tokens.)"""
    if inspect.isfunction(value):
        return value.__globals__["__name__"] == "transformers.integrations.hub_kernels"
    return getattr(type(value), "kernel_layer_name", None) not in (None, "rotary_pos_emb")


def same_arguments(ours: Callable[..., Any], theirs: Any) -> bool:
    # With the kernels package a function is a module with its signature on forward.
    theirs = type(theirs).forward.__get__(theirs) if isinstance(theirs, nn.Module) else theirs
    return [*inspect.signature(ours).parameters] == [*inspect.signature(theirs).parameters]
