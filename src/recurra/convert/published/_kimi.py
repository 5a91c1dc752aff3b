"""Kimi delta attention, latent attention and experts: transformers' KimiLinearForCausalLM."""

import re
from typing import Any

from torch import Tensor

from recurra.checks import require
from recurra.convert.published._rules import (
    EXPERTS,
    NORMS,
    STACK,
    SWIGLU,
    Architecture,
    Block,
    Rule,
    deepseek_experts,
    expert_rules,
    experts_of,
    kinds_of,
    one_or_list,
    plain_rules,
    shape_of,
    stacked,
)
from recurra.convert.published._settings import Settings, written
from recurra.mixers.base import mixer_options
from recurra.models.language_model import LanguageModelConfig

_Options = dict[str, dict[str, Any]]

# --- Kimi Linear (moonshotai/Kimi-Linear-48B-A3B-Instruct) ---

_LINEAR, _ATTENTION = "kda", "mla"
_OF_KIMI = {"linear_attention": _LINEAR, "full_attention": _ATTENTION}
_NETWORKS = {"dense": "swiglu", "sparse": EXPERTS}
_DELTA = {
    "decay_projection.0": "f_a_proj",
    "decay_projection.1": "f_b_proj",
    "dt_bias": "dt_bias",
    "rate_projection": "b_proj",
    "gate_projection.0": "g_a_proj",
    "gate_projection.1": "g_b_proj",
    "norm": "o_norm",
    "output_projection": "o_proj",
}
_LATENT = {
    "query_compression": "q_a_proj",
    "query_norm": "q_a_layernorm",
    "compression": "kv_a_proj_with_mqa",
    "norm": "kv_a_layernorm",
    "expansion": "kv_b_proj",
    "output_projection": "o_proj",
}
_MIXTURE = {
    **{f"shared.{own}": f"shared_experts.{name}" for own, name in SWIGLU.items()},
    "router.bias": "gate.e_score_correction_bias",
    "router": "gate",
}
_SIZES_OF_LATENT = {
    "n_heads": ("num_attention_heads", 32),
    "d_head": ("qk_nope_head_dim", 128),
    "d_value": ("v_head_dim", 128),
    "d_latent": ("kv_lora_rank", 512),
    "d_shared": ("qk_rope_head_dim", 64),
}
_SIZES_OF_EXPERTS = {
    "n_experts": ("num_experts", 256),
    "top_k": ("num_experts_per_token", 8),
    "d_expert": ("moe_intermediate_size", 1024),
    "n_groups": ("num_expert_group", 1),
    "top_groups": ("topk_group", 1),
}
_OTHER_NAMES = {
    "moe_renormalize": "norm_topk_prob",
    "n_group": "num_expert_group",
    "n_shared_experts": "num_shared_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "num_local_experts": "num_experts",
}
_UNREAD = """
head_dim max_position_embeddings model_max_length output_router_logits pretraining_tp qk_head_dim rope_scaling
rope_parameters rope_theta
"""
"""No layer has positions."""


def _kimi_config(settings: Settings, d_model: int, n_layer: int) -> dict[str, Any]:
    settings.only(hidden_act=("silu", "swish"), attention_bias=False, mla_use_nope=True, num_nextn_predict_layers=0)
    settings.only(moe_layer_freq=1, moe_router_activation_func="sigmoid", use_grouped_topk=True)
    settings.ignore(_UNREAD)
    kinds, delta = _linear_layers(settings, n_layer)
    epsilon, latent = settings.number("rms_norm_eps", 1e-5), settings.sizes(_SIZES_OF_LATENT)
    settings.only(num_key_value_heads=(latent["n_heads"], None))
    options: _Options = {
        _LINEAR: delta | {"norm_epsilon": epsilon},
        _ATTENTION: {
            **latent,
            "d_query_latent": settings.optional_size("q_lora_rank"),
            "rotation_base": None,
            "window": None,
            "dropout": settings.number("attention_dropout", 0.0),
        },
    }
    n_dense = settings.size("first_k_dense_replace", 1, least=0)
    networks = ["dense" if number < n_dense else "sparse" for number in range(n_layer)]
    networks = [_NETWORKS[kind] for kind in settings.layers("mlp_layer_types", _NETWORKS, networks)]
    experts = deepseek_experts(settings, _SIZES_OF_EXPERTS, 2.446)
    experts["d_shared"] = settings.size("num_shared_experts", 1) * experts["d_expert"]
    return {
        **shape_of([_OF_KIMI[kind] for kind in kinds], options, settings.size("intermediate_size", 9216), epsilon),
        "feed_forward": one_or_list(networks),
        "feed_forward_options": experts if EXPERTS in networks else {},
    }


def _linear_layers(settings: Settings, n_layer: int) -> tuple[list[str], dict[str, Any]]:
    """Read the layer types and the sizes of Kimi delta attention; published files have them in `linear_attn_config`."""
    section, whole = settings.section("linear_attn_config"), settings
    attending, linear = section.numbers("full_attn_layers"), section.numbers("kda_layers")
    kinds = ["full_attention" if number and number % 4 == 0 else "linear_attention" for number in range(n_layer)]
    if attending is not None or linear is not None:
        attending, linear = attending or [], linear or []
        are_all = sorted([*attending, *linear]) == list(range(1, n_layer + 1))
        expected = f"each of {n_layer} layers once, from 1"
        require(are_all, "full_attn_layers and kda_layers", (attending, linear), expected)
        kinds = ["full_attention" if number + 1 in set(attending) else "linear_attention" for number in range(n_layer)]
    n_heads = section.size("num_heads", whole.size("linear_num_heads", 32))
    channels = n_heads * section.size("head_dim", whole.size("linear_head_dim", 128))
    kernel = section.size("short_conv_kernel_size", whole.size("linear_conv_kernel_dim", 4))
    section.finish()
    sizes = {"n_heads": n_heads, "d_qk": channels, "d_v": channels, "kernel_size": kernel}
    given = whole.layers("layer_types", _OF_KIMI, kinds)
    agree = attending is None or [_OF_KIMI[kind] for kind in given] == [_OF_KIMI[kind] for kind in kinds]
    require(agree, "layer_types", given, "the layers of linear_attn_config")
    return given, sizes


def _kimi_rules(block: Block) -> list[Rule]:
    layer = f"model.layers.{block.number}."
    theirs, mixture = f"{layer}self_attn.", f"{layer}block_sparse_moe."
    experts = expert_rules(block, f"{mixture}experts.", {"gate": "w1", "up": "w3", "down": "w2"})
    rules = [*plain_rules(_MIXTURE, block.own_network, mixture), *experts]
    if block.mixer == _ATTENTION:
        queries = {"queries": "q_b_proj" if block.options["d_query_latent"] else "q_proj"}
        return [*rules, *plain_rules(_LATENT | queries, block.own, theirs)]
    rows = [block.options["d_qk"] or block.d_model] * 3
    return [
        *rules,
        stacked(f"{block.own}qkv.weight", [f"{theirs}{part}_proj.weight" for part in "qkv"], rows),
        stacked(f"{block.own}convolution.weight", [f"{theirs}{part}_conv1d.weight" for part in "qkv"], rows),
        *plain_rules({"A_log": "A_log"}, block.own, theirs, lambda a: a.flatten(), lambda a: (a.view(1, 1, -1, 1),)),
        *plain_rules(_DELTA, block.own, theirs),
    ]


def _usual_kimi(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename dense networks as in published files: transformers saves them under the mixtures' name, and loads both."""
    return {re.sub(r"\.block_sparse_moe\.(\w+_proj)\.", r".mlp.\1.", name): x for name, x in weights.items()}


def _kimi_settings(config: LanguageModelConfig, options: _Options) -> dict[str, Any]:
    delta, experts = options[_LINEAR], experts_of(config)
    latent = options.get(_ATTENTION, mixer_options(_ATTENTION))
    d_head = latent["d_head"] or config.d_model // latent["n_heads"]
    absent = {"d_head": d_head, "d_value": d_head, "d_latent": 4 * d_head, "d_shared": max(2, d_head // 4 * 2)}
    networks = {own: kind for kind, own in _NETWORKS.items()}
    return {
        "intermediate_size": max(config.d_channel_mixing, 1),
        "layer_types": kinds_of(config, _OF_KIMI),
        "mlp_layer_types": [networks.get(name, name) for name in config.feed_forwards],
        "linear_num_heads": delta["n_heads"],
        "linear_head_dim": (delta["d_qk"] or config.d_model) // delta["n_heads"],
        "linear_conv_kernel_dim": delta["kernel_size"],
        **written(
            {own: latent[own] or absent[own] for own in absent} | {"n_heads": latent["n_heads"]}, _SIZES_OF_LATENT
        ),
        "num_key_value_heads": latent["n_heads"],
        "q_lora_rank": latent["d_query_latent"],
        "attention_dropout": latent["dropout"],
        **written(experts, _SIZES_OF_EXPERTS),
        "num_shared_experts": max(experts["d_shared"] // experts["d_expert"], 1),
        "moe_renormalize": experts["normalise"],
        "routed_scaling_factor": experts["scale"],
        "rms_norm_eps": config.norm_epsilon,
        "pad_token_id": None,  # the default exceeds a small vocabulary, which the class refuses
    }


KIMI_LINEAR = Architecture(
    model_type="kimi_linear",
    mixer=_LINEAR,
    names=STACK | NORMS,
    config=_kimi_config,
    settings=_kimi_settings,
    rules=_kimi_rules,
    fits=lambda config: not config.tie_embeddings,  # the class ignores tying
    other_names=_OTHER_NAMES,
    other_layout=_usual_kimi,
)
