"""Stacks of recurrent layers and attention: transformers' RecurrentGemmaForCausalLM, Lfm2ForCausalLM and
Lfm2MoeForCausalLM.
"""

from typing import Any

import torch

from recurra.checks import require
from recurra.convert.published._rules import (
    EXPERTS,
    SWIGLU,
    Architecture,
    Block,
    Rule,
    Stack,
    networks_of,
    rotation_entries,
    shape_of,
)
from recurra.convert.published._settings import Settings, written

# --- Griffin (google/recurrentgemma-2b, -9b) ---

_OF_GEMMA = {"recurrent": "rg-lru", "attention": "rotary-attention"}
_RECURRENT = {
    "gate": "linear_y",
    "input_projection": "linear_x",
    "convolution": "conv_1d",
    "output_projection": "linear_out",
    "decay": "rg_lru.recurrent_param",
    "recurrence_gate.weight": "rg_lru.recurrent_gate_weight",
    "input_gate.weight": "rg_lru.input_gate_weight",
}
_GATES = {"recurrence_gate": "recurrent_gate", "input_gate": "input_gate"}


def _gemma_config(settings: Settings, d_model: int, n_layer: int) -> dict[str, Any]:
    n_heads = settings.size("num_attention_heads", 10)
    kinds = settings.words("block_types", _OF_GEMMA) or ["recurrent", "recurrent", "attention"]
    mixers = [_OF_GEMMA[kinds[number % len(kinds)]] for number in range(n_layer)]
    base, share = settings.rotation(0.5)
    require(base == 10000.0, "rope_theta", base, "10000.0, as rotary-attention has it")
    settings.only(hidden_activation="gelu_pytorch_tanh", attention_bias=False, embeddings_scale_by_sqrt_dim=True)
    settings.only(head_dim=d_model // n_heads)
    settings.ignore("w_init_variance_scale final_w_init_variance_scale layer_types layers_block_type")
    options: dict[str, dict[str, Any]] = {
        "rg-lru": {
            "lru_width": settings.optional_size("lru_width") or d_model,
            "n_heads": n_heads,
            "d_conv": settings.size("conv1d_width", 4),
        },
        "rotary-attention": {
            "n_heads": n_heads,
            "n_kv_heads": settings.optional_size("num_key_value_heads") or n_heads,
            "rotated_share": share,
            "window": settings.size("attention_window_size", 2048),
            "output_bias": True,
            "dropout": settings.number("attention_dropout", 0.0),
        },
    }
    d_hidden, epsilon = settings.size("intermediate_size", 3 * 2560) // 2, settings.number("rms_norm_eps", 1e-6)
    return {
        **shape_of(mixers, options, d_hidden, epsilon),
        "feed_forward": "geglu-tanh",
        "biases": True,
        # transformers keeps the factor in bfloat16
        "embedding_scale": float(torch.tensor(d_model**0.5, dtype=torch.bfloat16)),
        "logit_cap": settings.number("logits_soft_cap", 30.0),
    }


def _gemma_rules(block: Block) -> list[Rule]:
    theirs = f"model.layers.{block.number}.temporal_block."
    if block.mixer == "rotary-attention":
        return block.attention(theirs)
    n_heads = _recurrent_heads(block.d_model, block.options)
    biases = {f"{name}.bias": f"rg_lru.{other}_bias" for name, other in _GATES.items()}
    by_heads = block.plain(biases, theirs, torch.flatten, lambda x: (x.unflatten(0, (n_heads, -1)),))
    return [*block.plain(_RECURRENT, theirs), *by_heads]


def _recurrent_heads(d_model: int, options: dict[str, Any]) -> int:
    """Heads of rg-lru, by its own default."""
    return options["n_heads"] or max(1, (options["lru_width"] or d_model) // 256)


def _gemma_settings(stack: Stack) -> dict[str, Any]:
    recurrent, config = stack.mixer("rg-lru"), stack.config
    require(config.logit_cap is not None, "logit_cap", None, "a bound, as RecurrentGemma's logits have one")
    n_heads = _recurrent_heads(config.d_model, recurrent)
    attention = stack.mixer("rotary-attention", n_heads=n_heads, rotated_share=0.5, window=2048)
    return {
        "intermediate_size": 2 * config.d_channel_mixing,
        "num_attention_heads": n_heads,
        "num_key_value_heads": attention["n_kv_heads"] or n_heads,
        "block_types": stack.kinds(_OF_GEMMA),
        "lru_width": recurrent["lru_width"] or config.d_model,
        "conv1d_width": recurrent["d_conv"],
        "attention_window_size": attention["window"],
        "attention_dropout": attention["dropout"],
        **rotation_entries(attention),
        "rms_norm_eps": config.norm_epsilon,
        "logits_soft_cap": config.logit_cap,
    }


RECURRENT_GEMMA = Architecture(
    model_type="recurrent_gemma",
    mixer="rg-lru",
    names={
        "embedding": "model.embed_tokens",
        **{f"blocks.#.feed_forward.{own}": f"model.layers.#.mlp_block.{name}" for own, name in SWIGLU.items()},
        "head.linear": "lm_head",
    },
    scales={
        "blocks.#.norm_mixing": "model.layers.#.temporal_pre_norm",
        "blocks.#.norm_feed_forward": "model.layers.#.channel_pre_norm",
        "norm": "model.final_norm",
    },
    config=_gemma_config,
    settings=_gemma_settings,
    rules=_gemma_rules,
    tied=True,
    other_names={"_block_types": "block_types"},  # in the published files
)


# --- LFM2 (LiquidAI/LFM2-350M, -1.2B, -2.6B), and with experts (LFM2-8B-A1B) ---

_OF_LFM2 = {"conv": "short-conv", "full_attention": "rotary-attention"}
_SHORT = {"input_projection": "in_proj", "convolution": "conv", "output_projection": "out_proj"}
_GATED = {"gate": "w1", "up": "w3", "down": "w2"}
_OPTIONS_OF_LFM2 = {"kernel_size": ("conv_L_cache", 3), "biases": ("conv_bias", False)}
_EXPERTS_OF_LFM2 = {
    "n_experts": ("num_experts", 32),
    "top_k": ("num_experts_per_tok", 4),
    "d_expert": ("moe_intermediate_size", 1792),
    "normalise": ("norm_topk_prob", True),
}
_OF_NO_CLASS = """
block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_xavier_init conv_dim conv_dim_out
conv_use_xavier_init max_position_embeddings num_heads theta
"""


def _lfm2_config(settings: Settings, d_model: int, n_layer: int) -> dict[str, Any]:
    return _lfm2_stack(settings, d_model, n_layer, _lfm2_channels(settings))


def _lfm2_moe_config(settings: Settings, d_model: int, n_layer: int) -> dict[str, Any]:
    n_dense = min(settings.size("num_dense_layers", 2, least=0), n_layer)
    settings.only(use_expert_bias=True)
    settings.ignore("output_router_logits router_aux_loss_coef")
    experts = {"router": "sigmoid", **settings.options(_EXPERTS_OF_LFM2)}
    experts["scale"] = settings.positive("routed_scaling_factor")
    shape = _lfm2_stack(settings, d_model, n_layer, settings.size("intermediate_size", 7168))
    return {**shape, **networks_of([*["swiglu"] * n_dense, *[EXPERTS] * (n_layer - n_dense)], experts)}


def _lfm2_stack(settings: Settings, d_model: int, n_layer: int, d_hidden: int) -> dict[str, Any]:
    attending = settings.numbers("full_attn_idxs")
    attends = set(range(n_layer) if attending is None else attending)
    kinds = ["full_attention" if number in attends else "conv" for number in range(n_layer)]
    mixers = settings.layers("layer_types", _OF_LFM2, kinds)
    epsilon, base = settings.number("norm_eps", 1e-5), settings.whole_rotation(1e6)
    settings.only(block_use_swiglu=True, use_pos_enc=True)
    settings.ignore(_OF_NO_CLASS)
    n_heads = settings.size("num_attention_heads", 32)
    options = {
        "short-conv": settings.options(_OPTIONS_OF_LFM2),
        "rotary-attention": {
            "n_heads": n_heads,
            "n_kv_heads": settings.size("num_key_value_heads", 8),
            "d_head": settings.optional_size("head_dim") or d_model // n_heads,
            "rotation_base": base,
            "window": None,
            "qk_norm": epsilon,
        },
    }
    return shape_of(mixers, options, d_hidden, epsilon)


def _lfm2_channels(settings: Settings) -> int:
    """Hidden channels of the feed-forward networks: two thirds of what config.json says, rounded up."""
    n_channels, multiple = settings.size("intermediate_size", 12288), settings.size("block_multiple_of", 256)
    adjusted = int(settings.channels("block_ffn_dim_multiplier", 1.0, int(2 * n_channels / 3)))
    return -(-adjusted // multiple) * multiple if settings.flag("block_auto_adjust_ff_dim", True) else n_channels


def _lfm2_rules(block: Block) -> list[Rule]:
    theirs = f"model.layers.{block.number}."
    experts = block.experts(f"{theirs}feed_forward.experts.", _GATED)
    if block.mixer == "short-conv":
        return [*block.plain(_SHORT, f"{theirs}conv."), *experts]
    norms = {"query_norm": "q_layernorm", "key_norm": "k_layernorm"}
    theirs += "self_attn."
    return [*block.attention(theirs, output="out_proj"), *block.head_norms(norms, theirs), *experts]


def _lfm2_settings(stack: Stack) -> dict[str, Any]:
    config, (n_heads, n_kv_heads, d_head) = stack.config, stack.heads("rotary-attention", n_heads=1)
    return {
        "intermediate_size": max(config.d_channel_mixing, 1),
        "block_auto_adjust_ff_dim": False,
        "layer_types": stack.kinds(_OF_LFM2),
        **written(stack.mixer("short-conv"), _OPTIONS_OF_LFM2),
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "head_dim": d_head,
        "rope_parameters": {"rope_type": "default", "rope_theta": stack.mixer("rotary-attention")["rotation_base"]},
        "norm_eps": config.norm_epsilon,
    }


def _lfm2_moe_settings(stack: Stack) -> dict[str, Any]:
    entries = _lfm2_settings(stack)
    del entries["block_auto_adjust_ff_dim"]
    return {
        **entries,
        **written(stack.experts, _EXPERTS_OF_LFM2),
        "num_dense_layers": stack.config.feed_forwards.index(EXPERTS),
        "routed_scaling_factor": stack.experts["scale"],
    }


LFM2 = Architecture(
    model_type="lfm2",
    mixer="short-conv",
    names={
        "embedding": "model.embed_tokens",
        "blocks.#.norm_mixing": "model.layers.#.operator_norm",
        "blocks.#.norm_feed_forward": "model.layers.#.ffn_norm",
        **{f"blocks.#.feed_forward.{own}": f"model.layers.#.feed_forward.{name}" for own, name in _GATED.items()},
        "norm": "model.embedding_norm",  # of what enters the head
        "head": "lm_head",
    },
    config=_lfm2_config,
    settings=_lfm2_settings,
    rules=_lfm2_rules,
    fits=lambda stack: not stack.has_experts,
    tied=True,
    other_names={"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"},
)
LFM2_MOE = LFM2._replace(
    model_type="lfm2_moe",
    names={
        **LFM2.names,
        "blocks.#.feed_forward.router.bias": "model.layers.#.feed_forward.expert_bias",
        "blocks.#.feed_forward.router": "model.layers.#.feed_forward.gate",
    },
    config=_lfm2_moe_config,
    settings=_lfm2_moe_settings,
    fits=lambda stack: stack.has_experts,
    other_names={"tie_embedding": "tie_word_embeddings"},
)
