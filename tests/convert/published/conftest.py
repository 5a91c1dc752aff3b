"""Small models of transformers' own classes, with random weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.utils import logging

SIZES = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2}
GEMMA = {
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "attention_window_size": 5,
    "pad_token_id": 0,
}
XLSTM = {"num_heads": 4, "ffn_proj_factor": 1.4, "ffn_round_up_to_multiple_of": 8, "autocast_kernel_dtype": "float32"}
RWKV = {"intermediate_size": 20, "rescale_every": 0}
QWEN = {
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}
QWEN_NEXT = {**QWEN, "mlp_only_layers": [0, 1]}
JAMBA = {
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 1,
    "mamba_d_state": 5,
    "mamba_d_conv": 3,
    "mamba_dt_rank": 3,
    "rms_norm_eps": 1e-3,
}
BAMBA = {
    "num_hidden_layers": 3,
    "intermediate_size": 20,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "mamba_d_state": 6,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_conv": 3,
    "pad_token_id": None,
}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
    "num_hidden_layers": 5,
    "intermediate_size": 20,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 10,
    "ssm_state_size": 6,
    "mamba_num_heads": 6,
    "mamba_head_dim": 5,
    "n_groups": 2,
    "conv_kernel": 3,
    "chunk_size": 8,
    "layer_norm_epsilon": 1e-3,
    "pad_token_id": None,
}
OF_NEMOTRON = {
    **NEMOTRON,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention", "mlp"],
    "num_hidden_layers": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 7,
    "moe_shared_expert_intermediate_size": 9,
    "routed_scaling_factor": 1.3,
    "time_step_min": 1e-9,
}
LATENT = ["linear_attention", "moe", "full_attention", "moe"]
GROUPED = {"n_group": 3, "topk_group": 2, "moe_latent_size": 11, "norm_topk_prob": False}
GRANITE = {
    **BAMBA,
    "intermediate_size": 9,
    "shared_intermediate_size": 14,
    "mamba_chunk_size": 8,
    "rms_norm_eps": 1e-3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
    "logits_scaling": 1.9,
}
FALCON_H1 = {
    "intermediate_size": 20,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "mamba_d_ssm": 30,
    "mamba_d_state": 6,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 8,
    "rms_norm_eps": 1e-3,
    "embedding_multiplier": 2.3,
    "lm_head_multiplier": 0.6,
    "pad_token_id": None,
}
MULTIPLIERS = {
    "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.9,
    "key_multiplier": 0.7,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.8,
    "mlp_multipliers": [0.9, 1.2],
    "ssm_multipliers": [1.3, 0.6, 1.2, 0.7, 0.9],
}
LFM2 = {
    "num_hidden_layers": 3,
    "intermediate_size": 31,
    "block_multiple_of": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
ROTATION = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
MROPE = {**ROTATION, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}
LFM2_MOE = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "intermediate_size": 21,
    "moe_intermediate_size": 9,
    "num_dense_layers": 1,
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
OF_LFM2 = {"tie_word_embeddings": False, "block_ffn_dim_multiplier": 1.3, "head_dim": 10}
OF_GRANITE = {"position_embedding_type": "rope", "head_dim": 10}
OF_GRANITE |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
OF_JAMBA = {"num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 0}
OF_QWEN = {"num_experts": 6, "num_experts_per_tok": 3}
OF_QWEN |= {"moe_intermediate_size": 7, "shared_expert_intermediate_size": 9}
SOME = {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [3], "full_attention_interval": 2}
HYBRID = ["linear_attention", "full_attention"]
OLMO = {**QWEN, "pad_token_id": None, "linear_conv_kernel_dim": 3, "rms_norm_eps": 1e-3}
del OLMO["head_dim"]
KIMI = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "intermediate_size": 20,
    "moe_intermediate_size": 7,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 11,
    "qk_rope_head_dim": 3,
    "qk_nope_head_dim": 7,
    "v_head_dim": 5,
    "linear_head_dim": 6,
    "linear_num_heads": 2,
    "linear_conv_kernel_dim": 3,
    "rms_norm_eps": 1e-3,
    "pad_token_id": None,
}
OF_KIMI = {"q_lora_rank": 9, "n_group": 3, "topk_group": 2, "n_shared_experts": 2, "norm_topk_prob": False}
ZAMBA = {
    "num_hidden_layers": 5,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid", "hybrid"],
    "num_mem_blocks": 2,
    "intermediate_size": 20,
    "mamba_d_state": 6,
    "mamba_d_conv": 3,
    "mamba_ngroups": 2,
    "n_mamba_heads": 4,
    "chunk_size": 8,
    "num_attention_heads": 4,
    "adapter_rank": 3,
    "rms_norm_eps": 1e-3,
    "time_step_min": 1e-9,
    "pad_token_id": None,
}
OF_ZAMBA = {"use_shared_attention_adapter": True, "use_mem_rope": True, "mamba_expand": 1, "num_mem_blocks": 1}
OF_ZAMBA |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
MINIMAX = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "intermediate_size": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "rms_norm_eps": 1e-3,
}
OF_MINIMAX = {f"{half}_alpha_factor": 3.5 for half in ("full_attn", "linear_attn", "mlp")} | {"head_dim": 10}
OF_MINIMAX |= {f"{half}_beta_factor": 0.7 for half in ("full_attn", "linear_attn", "mlp")}
NOPE = {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", {"state_size": 5, "conv_kernel": 3, "time_step_rank": 3}),
    "mamba-untied": ("Mamba", {"tie_word_embeddings": False, "expand": 1}),
    "falcon-mamba": ("FalconMamba", {"state_size": 5, "mixer_rms_eps": 1e-3}),
    "jamba": ("Jamba", {**JAMBA, "num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "jamba-experts": ("Jamba", {**JAMBA, **OF_JAMBA, "num_experts": 5, "num_experts_per_tok": 3}),
    "jamba-experts-everywhere": ("Jamba", {**JAMBA, **OF_JAMBA, "num_experts": 4, "expert_layer_period": 1}),
    "jamba-without-attention": ("Jamba", {**JAMBA, "tie_word_embeddings": True}),
    "mamba2": ("Mamba2", {"state_size": 6, "num_heads": 6, "head_dim": 8, "n_groups": 2, "chunk_size": 8}),
    "bamba": ("Bamba", {**BAMBA, "attn_layer_indices": [1], "mamba_chunk_size": 8}),
    "bamba-tied": ("Bamba", {**BAMBA, "attn_layer_indices": [0], "mamba_expand": 1, "head_dim": 12, **TIED}),
    "falcon-h1": ("FalconH1", {**FALCON_H1, **MULTIPLIERS}),
    "falcon-h1-norm": ("FalconH1", {**FALCON_H1, "mamba_rms_norm": True, "head_dim": 10}),
    "falcon-h1-norm-last": ("FalconH1", {**FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False, **TIED}),
    "granite": ("GraniteMoeHybrid", {**GRANITE, "num_local_experts": 5, "num_experts_per_tok": 3}),
    "granite-rope": ("GraniteMoeHybrid", {**GRANITE, **OF_GRANITE, "num_local_experts": 4, **TIED}),
    "granite-dense": ("GraniteMoeHybrid", {**GRANITE, **OF_GRANITE, "num_local_experts": 0}),
    "granite-without-attention": ("GraniteMoeHybrid", {**GRANITE, "layer_types": None, "logits_scaling": 1}),
    "nemotron": ("NemotronH", {**NEMOTRON, "time_step_min": 1e-9}),
    "nemotron-limit": ("NemotronH", {**NEMOTRON, "time_step_min": 0.6}),  # which its cached steps do not apply
    "nemotron-experts": ("NemotronH", OF_NEMOTRON),
    "nemotron-latent-experts": ("NemotronH", {**OF_NEMOTRON, **GROUPED, "layers_block_type": LATENT}),
    "xlstm": ("xLSTM", XLSTM),
    "rwkv": ("Rwkv", RWKV),
    "rwkv-tied": ("Rwkv", {"attention_hidden_size": 16, "tie_word_embeddings": True}),
    "lfm2": ("Lfm2", {**LFM2, "layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-3}),
    "lfm2-biases": ("Lfm2", {**LFM2, "full_attn_idxs": [0], "conv_bias": True, "conv_L_cache": 4, **OF_LFM2}),
    "lfm2-experts": ("Lfm2Moe", LFM2_MOE),
    "lfm2-experts-everywhere": ("Lfm2Moe", {**LFM2_MOE, "num_dense_layers": 0, "norm_topk_prob": False, **UNTIED}),
    "kimi": ("KimiLinear", KIMI),
    "kimi-groups": ("KimiLinear", {**KIMI, **OF_KIMI, "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "kimi-dense": ("KimiLinear", {**KIMI, "mlp_layer_types": ["dense"] * 3, "layer_types": ["linear_attention"] * 3}),
    "minimax": ("MiniMax", MINIMAX),
    # whose cache counts the steps of a window in its first layer
    "minimax-factors": ("MiniMax", {**MINIMAX, **OF_MINIMAX, **TIED, "layer_types": None, "sliding_window": 7}),
    "olmo": ("OlmoHybrid", {**OLMO, "layer_types": HYBRID}),
    "olmo-without-positions": (
        "OlmoHybrid",
        {**OLMO, **NOPE, "num_hidden_layers": 5, "linear_allow_neg_eigval": False},
    ),
    "qwen3.5": ("Qwen3_5", {**QWEN, "layer_types": HYBRID, "rope_parameters": MROPE, "linear_conv_kernel_dim": 3}),
    "qwen3.5-tied": ("Qwen3_5", {**QWEN, "num_hidden_layers": 3, "full_attention_interval": 2, **TIED}),
    "qwen3.5-experts": ("Qwen3_5Moe", {**QWEN, **OF_QWEN, "layer_types": HYBRID, "rope_parameters": MROPE}),
    "qwen3-next": ("Qwen3Next", {**QWEN_NEXT, "layer_types": HYBRID, "rope_parameters": ROTATION}),
    "qwen3-next-experts": ("Qwen3Next", {**QWEN, **OF_QWEN, "layer_types": HYBRID}),
    "qwen3-next-some-experts": ("Qwen3Next", {**QWEN, **OF_QWEN, "num_hidden_layers": 5, **SOME}),
    "qwen3-next-linear": ("Qwen3Next", {**QWEN_NEXT, "full_attention_interval": 5, "tie_word_embeddings": True}),
    "zamba2": ("Zamba2", ZAMBA),
    "zamba2-adapters": ("Zamba2", {**ZAMBA, **OF_ZAMBA}),
    "zamba2-limit": ("Zamba2", {**ZAMBA, "time_step_min": 0.6}),  # which its cached steps do not apply
    "recurrent-gemma": ("RecurrentGemma", {**GEMMA, "num_hidden_layers": 4}),
    "recurrent-gemma-without-attention": ("RecurrentGemma", {**GEMMA, "logits_soft_cap": 5.0}),
}
"""Class and settings of each model, by a name for the tests."""


def peer(name: str, **changes: Any) -> nn.Module:
    """Make one of `CASES` in evaluation mode, every weight random."""
    kind, settings = CASES[name]
    made = getattr(transformers, f"{kind}ForCausalLM")
    torch.manual_seed(0)
    config = made.config_class(**{**SIZES, **settings, **changes})
    config._experts_implementation = "eager"  # the others take float32 alone, and sizes that are multiples of 4
    model = made(config).eval()
    with torch.no_grad():
        biases = (buffer for name, buffer in model.named_buffers() if name.endswith(("expert_bias", "correction_bias")))
        for parameter in (*model.parameters(), *biases):
            parameter.normal_(0, 0.3)
    return model


@pytest.fixture(scope="session")
def peers(tmp_path_factory) -> Callable[[str], tuple[nn.Module, Path]]:
    """A peer of `CASES` and its folder, made once; both are only to be read."""
    known: dict[str, tuple[nn.Module, Path]] = {}
    logging.disable_progress_bar()

    def made(name: str) -> tuple[nn.Module, Path]:
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            model = peer(name)
            model.save_pretrained(folder)
            known[name] = (model, folder)
        return known[name]

    return made
