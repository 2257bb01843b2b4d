"""Tiny models of transformers with random weights, one for each mixer that Fulmen patches.

A token goes to all experts, of which there are two: a choice among them would be one that rounding could change.
"""

import torch
import transformers

SHARED = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8}
GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
    "head_dim": 16,
}
KDA = {
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "dense"],
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "linear_head_dim": 16,
    "linear_num_heads": 2,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_local_experts": 2,
    "num_experts_per_tok": 2,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

# The configuration's class and what it needs, by the name of the model's class without ForCausalLM.
CONFIGS = {
    "Mamba2": {
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
        "num_hidden_layers": 2,
        "chunk_size": 8,
    },
    "Bamba": {**MAMBA, "num_hidden_layers": 2, "attn_layer_indices": [1]},
    "FalconH1": {**MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 64, "head_dim": 16},
    "GraniteMoeHybrid": {
        **MAMBA,
        "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "NemotronH": {
        "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "head_dim": 16,
    },
    "Zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "n_mamba_heads": 4,
        "mamba_d_state": 16,
        "mamba_ngroups": 2,
        "chunk_size": 8,
        "mamba_expand": 2,
        "num_mem_blocks": 1,
        "num_key_value_heads": 2,
    },
    "MiniMax": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 16,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "block_size": 8,
    },
    "Lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "Lfm2Moe": {
        **EXPERTS,
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
    },
    "Mamba": {"num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4},
    "FalconMamba": {"num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4},
    "Jamba": {
        **EXPERTS,
        "num_hidden_layers": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "Zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "num_key_value_heads": 2,
    },
    "Qwen3Next": {**GDN, **EXPERTS, "shared_expert_intermediate_size": 16},
    "Qwen3_5": {**GDN},
    "Qwen3_5Moe": {**GDN, **EXPERTS, "shared_expert_intermediate_size": 16},
    "OlmoHybrid": {**GDN},
    "Qwen4Exp": {
        **GDN,
        **EXPERTS,
        "shared_expert_intermediate_size": 16,
        "hc_lowrank": 8,
        "hc_count": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "KimiLinear": {**KDA},
    "BailingHybrid": {**KDA, "n_group": 1, "topk_group": 1, "head_dim": 16},
    "Glm5Next": {
        **KDA,
        "n_routed_experts": 2,
        "hc_mult": 2,
        "qk_rope_head_dim": 0,
        "head_dim": 0,
        "q_lora_rank": 16,
        "index_head_dim": 16,
        "index_n_heads": 2,
    },
    "Inkling": {
        **EXPERTS,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 16,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "mlp_layer_types": ["dense", "dense"],
        "d_rel": 4,
        "rel_extent": 16,
        "logits_mup_width_multiplier": 1.0,
    },
}


DELTA_RULE = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "OlmoHybrid", "Qwen4Exp", "KimiLinear", "BailingHybrid", "Glm5Next")
MAMBA2 = ("Mamba2", "Bamba", "FalconH1", "GraniteMoeHybrid", "NemotronH", "Zamba2")


def build(name, **changes):
    """A model of this family, the same at each call, with weights so large that every layer counts: as transformers
    begins, a mixer could be left out and the logits would hardly change."""
    config = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    model = getattr(transformers, f"{name}ForCausalLM", None) or getattr(transformers, f"{name}TextModel")
    torch.manual_seed(0)
    made = model(config(**{**SHARED, **CONFIGS[name], **changes})).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return made


def tokens(*shape, seed=1):
    return torch.randint(2, SHARED["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def relative(a, b):
    """How far a is from b, in parts of b's largest magnitude."""
    return ((a - b).abs().max() / b.abs().max()).item()
