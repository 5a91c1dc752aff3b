"""Stacks of recurrent layers and attention: transformers' RecurrentGemmaForCausalLM, Qwen3NextForCausalLM,
Qwen3_5ForCausalLM, Lfm2ForCausalLM and Lfm2MoeForCausalLM.
"""

from collections.abc import Mapping
from typing import Any

import torch

from recurra.checks import require
from recurra.convert.published._rules import (
    EXPERTS,
    SWIGLU,
    Architecture,
    Block,
    Fused,
    Rule,
    Settings,
    attention_rules,
    expert_rules,
    experts_of,
    head_norm_rules,
    heads_of,
    one_or_list,
    plain_rules,
    stacked,
    written,
)
from recurra.mixers.base import mixer_options
from recurra.models.language_model import LanguageModelConfig

_Options = dict[str, dict[str, Any]]


def _kinds(config: LanguageModelConfig, known: dict[str, str]) -> list[str]:
    """Return what config.json calls the mixers of the blocks."""
    names = {name: kind for kind, name in known.items()}
    return [names.get(name, name) for name, _ in config.mixers]


def _rotation(base: float, share: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": share}}


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
    options = {
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
    return {
        "d_channel_mixing": settings.size("intermediate_size", 3 * 2560) // 2,
        "mixer": mixers,
        "mixer_options": {name: options[name] for name in dict.fromkeys(mixers)},
        "feed_forward": "geglu-tanh",
        "norm_epsilon": settings.number("rms_norm_eps", 1e-6),
        "biases": True,
        # transformers keeps the factor in bfloat16
        "embedding_scale": float(torch.tensor(d_model**0.5, dtype=torch.bfloat16)),
        "logit_cap": settings.number("logits_soft_cap", 30.0),
    }


def _gemma_rules(block: Block) -> list[Rule]:
    own, theirs = block.own, f"model.layers.{block.number}.temporal_block."
    if block.mixer == "rotary-attention":
        return attention_rules(block, theirs)
    n_heads = _recurrent_heads(block.d_model, block.options)
    biases = {f"{name}.bias": f"rg_lru.{other}_bias" for name, other in _GATES.items()}
    return [
        *plain_rules(_RECURRENT, own, theirs),
        *plain_rules(biases, own, theirs, torch.flatten, lambda x: (x.unflatten(0, (n_heads, -1)),)),
    ]


def _recurrent_heads(d_model: int, options: dict[str, Any]) -> int:
    """Heads of rg-lru, by its own default."""
    return options["n_heads"] or max(1, (options["lru_width"] or d_model) // 256)


def _gemma_settings(config: LanguageModelConfig, options: _Options) -> dict[str, Any]:
    require(config.logit_cap is not None, "logit_cap", None, "a bound, as RecurrentGemma's logits have one")
    recurrent = options["rg-lru"]
    n_heads = _recurrent_heads(config.d_model, recurrent)
    absent = mixer_options("rotary-attention") | {"n_heads": n_heads, "rotated_share": 0.5, "window": 2048}
    attention = options.get("rotary-attention", absent)
    return {
        "intermediate_size": 2 * config.d_channel_mixing,
        "num_attention_heads": n_heads,
        "num_key_value_heads": attention["n_kv_heads"] or n_heads,
        "block_types": _kinds(config, _OF_GEMMA),
        "lru_width": recurrent["lru_width"] or config.d_model,
        "conv1d_width": recurrent["d_conv"],
        "attention_window_size": attention["window"],
        "attention_dropout": attention["dropout"],
        **_rotation(attention["rotation_base"], attention["rotated_share"]),
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


# --- Qwen3-Next (Qwen/Qwen3-Next-80B-A3B-Instruct), and dense Qwen3.5 (Qwen/Qwen3.5-0.8B, -27B) ---

_LINEAR, _ATTENTION = "gated-delta-net", "gated-attention"
_OF_QWEN = {"linear_attention": _LINEAR, "full_attention": _ATTENTION}
_HEADS = {
    "n_heads": ("num_attention_heads", 16),
    "n_kv_heads": ("num_key_value_heads", 2),
    "d_head": ("head_dim", 256),
}
_SIZES_OF_EXPERTS = {
    "n_experts": ("num_experts", 512),
    "top_k": ("num_experts_per_tok", 10),
    "d_expert": ("moe_intermediate_size", 512),
    "d_shared": ("shared_expert_intermediate_size", 512),
}
_OF_IMAGES = """
text_config vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id language_model_only
"""
_DELTA = {
    "convolution": "conv1d",
    "A_log": "A_log",
    "dt_bias": "dt_bias",
    "norm": "norm",
    "output_projection": "out_proj",
}
_PROJECTIONS = {"qkv": "in_proj_qkv", "gate_projection": "in_proj_z"}
_PROJECTIONS |= {"rate_projection": "in_proj_b", "decay_projection": "in_proj_a"}


def _qwen3_next_config(settings: Settings, d_model: int, n_layer: int) -> dict[str, Any]:
    dense, step = set(settings.numbers("mlp_only_layers") or ()), settings.size("decoder_sparse_step", 1)
    n_experts = settings.size("num_experts", 512, least=0)
    sparse = [bool(n_experts) and number not in dense and (number + 1) % step == 0 for number in range(n_layer)]
    others = {own: entry for own, entry in _SIZES_OF_EXPERTS.items() if own != "n_experts"}
    experts = {"n_experts": n_experts, **settings.sizes(others), "shared_gate": True}
    experts["normalise"] = settings.flag("norm_topk_prob", True)
    settings.ignore("output_router_logits router_aux_loss_coef")
    d_hidden = settings.size("intermediate_size", 5632)
    return {
        **_qwen_config(settings, n_layer, d_hidden, _HEADS, settings.rotation(0.25)),
        "feed_forward": one_or_list([EXPERTS if one else "swiglu" for one in sparse]),
        "feed_forward_options": experts if any(sparse) else {},
    }


def _qwen3_5_config(settings: Settings, d_model: int, n_layer: int) -> dict[str, Any]:
    settings.only(attn_output_gate=True, output_gate_type=("swish", "silu"))
    # further layers that predict tokens ahead, which transformers' class does not load
    settings.ignore("mamba_ssm_dtype mlp_only_layers mtp_num_hidden_layers mtp_use_dedicated_embeddings")
    # how the channels are shared between positions in time and in images, which are equal in a text
    rotation = settings.rotation(0.25, neutral="mrope_section mrope_interleaved")
    heads = _HEADS | {"n_kv_heads": ("num_key_value_heads", 4)}
    return _qwen_config(settings, n_layer, settings.size("intermediate_size", 12288), heads, rotation)


def of_qwen3_5(entries: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Take the language model's entries out of a config.json of images and text, which is called `name`."""
    text: Any = entries.get("text_config")
    require(isinstance(text, dict), f"text_config in {name}", text, "an object")
    settings = Settings(entries, name)
    settings.ignore(_OF_IMAGES)
    tied = settings.flag("tie_word_embeddings", False)
    settings.finish()
    return {"model_type": "qwen3_5_text", **text, "tie_word_embeddings": tied}


def _qwen_config(
    settings: Settings,
    n_layer: int,
    d_hidden: int,
    heads: Mapping[str, tuple[str, int]],
    rotation: tuple[float, float],
) -> dict[str, Any]:
    kinds = settings.words("layer_types", _OF_QWEN)
    interval = settings.size("full_attention_interval", 4)
    kinds = kinds or [list(_OF_QWEN)[(number + 1) % interval == 0] for number in range(n_layer)]
    require(len(kinds) == n_layer, "layer_types", kinds, f"one of {', '.join(_OF_QWEN)} for each of {n_layer} layers")
    settings.only(hidden_act=("silu", "swish"), attention_bias=False)
    settings.ignore("max_position_embeddings")
    epsilon, (base, share) = settings.number("rms_norm_eps", 1e-6), rotation
    n_qk_heads, n_heads = settings.size("linear_num_key_heads", 16), settings.size("linear_num_value_heads", 32)
    options: _Options = {
        _LINEAR: {
            "n_heads": n_heads,
            "n_qk_heads": n_qk_heads,
            "d_qk": n_qk_heads * settings.size("linear_key_head_dim", 128),
            "d_v": n_heads * settings.size("linear_value_head_dim", 128),
            "kernel_size": settings.size("linear_conv_kernel_dim", 4),
            "norm_epsilon": epsilon,
        },
        _ATTENTION: {
            **settings.sizes(heads),
            "rotated_share": share,
            "rotation_base": base,
            "window": None,
            "dropout": settings.number("attention_dropout", 0.0),
            "norm_epsilon": epsilon,
        },
    }
    return _shape_of([_OF_QWEN[kind] for kind in kinds], options, d_hidden, epsilon)


def _shape_of(mixers: list[str], options: _Options, d_hidden: int, epsilon: float) -> dict[str, Any]:
    return {
        "d_channel_mixing": d_hidden,
        "mixer": mixers,
        "mixer_options": {name: options[name] for name in dict.fromkeys(mixers)},
        "feed_forward": "swiglu",
        "norm_epsilon": epsilon,
    }


def _qwen3_next_rules(block: Block) -> list[Rule]:
    experts = expert_rules(block, f"model.layers.{block.number}.mlp.experts.", SWIGLU)
    if block.mixer == _ATTENTION:
        return [*_qwen_attention_rules(block), *experts]
    (q, k, v, gate), (rate, decay) = (fused.names for fused in _qwen3_next_fused(block))
    sizes = _sizes(block.d_model, block.options)
    rows = [sizes["d_qk"], sizes["d_qk"], sizes["d_v"]]
    split = {"gate_projection.weight": gate, "rate_projection.weight": rate, "decay_projection.weight": decay}
    return [
        *experts,
        stacked(f"{block.own}qkv.weight", [q, k, v], rows),
        *plain_rules(split, block.own),
        *plain_rules(_DELTA, block.own, f"model.layers.{block.number}.linear_attn."),
    ]


def _qwen3_5_rules(block: Block) -> list[Rule]:
    if block.mixer == _ATTENTION:
        return _qwen_attention_rules(block)
    return plain_rules(_DELTA | _PROJECTIONS, block.own, f"model.layers.{block.number}.linear_attn.")


def _qwen_attention_rules(block: Block) -> list[Rule]:
    theirs = f"model.layers.{block.number}.self_attn."
    ((q, gate),) = (fused.names for fused in _qwen3_5_fused(block))
    return [
        *attention_rules(block, theirs, queries=q),
        *plain_rules({"gate_projection.weight": gate}, block.own),
        *head_norm_rules(block, {"query_norm": "q_norm", "key_norm": "k_norm"}, theirs, less=1.0),
    ]


def _qwen3_5_fused(block: Block) -> list[Fused]:
    if block.mixer == _LINEAR:
        return []
    n_heads, _, d_head = heads_of(block)
    return [Fused(f"model.layers.{block.number}.self_attn.q_proj.weight", ("q", "gate"), n_heads, (d_head, d_head))]


def _qwen3_next_fused(block: Block) -> list[Fused]:
    if block.mixer == _ATTENTION:
        return _qwen3_5_fused(block)
    theirs, sizes = f"model.layers.{block.number}.", _sizes(block.d_model, block.options)
    n_groups = sizes["n_qk_heads"]
    d_k, d_v, shared_by = sizes["d_qk"] // n_groups, sizes["d_v"] // n_groups, sizes["n_heads"] // n_groups
    return [
        Fused(f"{theirs}linear_attn.in_proj_qkvz.weight", ("q", "k", "v", "z"), n_groups, (d_k, d_k, d_v, d_v)),
        Fused(f"{theirs}linear_attn.in_proj_ba.weight", ("b", "a"), n_groups, (shared_by, shared_by)),
    ]


def _sizes(d_model: int, options: dict[str, Any]) -> dict[str, int]:
    """The sizes of a Gated DeltaNet, by its own defaults."""
    n_heads = options["n_heads"]
    d_qk = options["d_qk"] or n_heads * max(1, 3 * d_model // (4 * n_heads))
    n_qk_heads = options["n_qk_heads"] or n_heads
    return {"n_heads": n_heads, "n_qk_heads": n_qk_heads, "d_qk": d_qk, "d_v": options["d_v"] or 2 * d_qk}


def _qwen3_next_settings(config: LanguageModelConfig, options: _Options) -> dict[str, Any]:
    experts = experts_of(config)
    dense = [number for number, name in enumerate(config.feed_forwards) if name != EXPERTS]
    return {
        **_qwen_settings(config, options),
        **written(experts | {"d_shared": max(experts["d_shared"], 1)}, _SIZES_OF_EXPERTS),
        "norm_topk_prob": experts["normalise"],
        "mlp_only_layers": dense,
    }


def _qwen_settings(config: LanguageModelConfig, options: _Options) -> dict[str, Any]:
    linear = options.get(_LINEAR, mixer_options(_LINEAR))
    attention = options.get(_ATTENTION, mixer_options(_ATTENTION))
    sizes = _sizes(config.d_model, linear)
    n_heads, n_kv_heads, d_head = heads_of(Block(0, _ATTENTION, attention, config.d_model))
    return {
        "intermediate_size": max(config.d_channel_mixing, 1),
        "layer_types": _kinds(config, _OF_QWEN),
        "linear_num_key_heads": sizes["n_qk_heads"],
        "linear_num_value_heads": sizes["n_heads"],
        "linear_key_head_dim": sizes["d_qk"] // sizes["n_qk_heads"],
        "linear_value_head_dim": sizes["d_v"] // sizes["n_heads"],
        "linear_conv_kernel_dim": linear["kernel_size"],
        **written({"n_heads": n_heads, "n_kv_heads": n_kv_heads, "d_head": d_head}, _HEADS),
        "attention_dropout": attention["dropout"],
        **_rotation(attention["rotation_base"], attention["rotated_share"]),
        "rms_norm_eps": config.norm_epsilon,
    }


QWEN3_5 = Architecture(
    model_type="qwen3_5_text",
    mixer=_LINEAR,
    names={
        "embedding": "model.embed_tokens",
        **{f"blocks.#.feed_forward.{own}": f"model.layers.#.mlp.{name}" for own, name in SWIGLU.items()},
        "head": "lm_head",
    },
    scales={
        "blocks.#.norm_mixing": "model.layers.#.input_layernorm",
        "blocks.#.norm_feed_forward": "model.layers.#.post_attention_layernorm",
        "norm": "model.norm",
    },
    config=_qwen3_5_config,
    settings=_qwen_settings,
    rules=_qwen3_5_rules,
    fused=_qwen3_5_fused,
    fits=lambda config: EXPERTS not in config.feed_forwards,
    other_tensors={"model.language_model.": "model.", "model.visual.": None, "mtp.": None},
)
QWEN3_NEXT = QWEN3_5._replace(
    model_type="qwen3_next",
    names={
        **QWEN3_5.names,
        **{f"blocks.#.feed_forward.shared.{own}": f"model.layers.#.mlp.shared_expert.{x}" for own, x in SWIGLU.items()},
        "blocks.#.feed_forward.shared_gate": "model.layers.#.mlp.shared_expert_gate",
        "blocks.#.feed_forward.router": "model.layers.#.mlp.gate",
    },
    config=_qwen3_next_config,
    settings=_qwen3_next_settings,
    rules=_qwen3_next_rules,
    fused=_qwen3_next_fused,
    fits=lambda config: True,
    other_tensors={"mtp.": None},
)


# --- LFM2 (LiquidAI/LFM2-350M, -1.2B, -2.6B), and with experts (LFM2-8B-A1B) ---

_OF_LFM2 = {"conv": "short-conv", "full_attention": "rotary-attention"}
_SHORT = {"input_projection": "in_proj", "convolution": "conv", "output_projection": "out_proj"}
_GATED = {"gate": "w1", "up": "w3", "down": "w2"}
_EXPERTS_OF_LFM2 = {
    "n_experts": ("num_experts", 32),
    "top_k": ("num_experts_per_tok", 4),
    "d_expert": ("moe_intermediate_size", 1792),
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
    experts = {"router": "sigmoid", **settings.sizes(_EXPERTS_OF_LFM2)}
    experts |= {"normalise": settings.flag("norm_topk_prob", True), "scale": settings.positive("routed_scaling_factor")}
    return {
        **_lfm2_stack(settings, d_model, n_layer, settings.size("intermediate_size", 7168)),
        "feed_forward": one_or_list([*["swiglu"] * n_dense, *[EXPERTS] * (n_layer - n_dense)]),
        "feed_forward_options": experts if n_dense < n_layer else {},
    }


def _lfm2_stack(settings: Settings, d_model: int, n_layer: int, d_hidden: int) -> dict[str, Any]:
    kinds, attending = settings.words("layer_types", _OF_LFM2), settings.numbers("full_attn_idxs")
    attends = set(range(n_layer) if attending is None else attending)
    kinds = kinds or ["full_attention" if number in attends else "conv" for number in range(n_layer)]
    require(len(kinds) == n_layer, "layer_types", kinds, f"one of {', '.join(_OF_LFM2)} for each of {n_layer} layers")
    epsilon, (base, share) = settings.number("norm_eps", 1e-5), settings.rotation(1.0, 1e6)
    require(share == 1, "partial_rotary_factor", share, "1.0, as transformers' class turns all channels")
    settings.only(block_use_swiglu=True, use_pos_enc=True)
    settings.ignore(_OF_NO_CLASS)
    n_heads = settings.size("num_attention_heads", 32)
    options: _Options = {
        "short-conv": {"kernel_size": settings.size("conv_L_cache", 3), "biases": settings.flag("conv_bias", False)},
        "rotary-attention": {
            "n_heads": n_heads,
            "n_kv_heads": settings.size("num_key_value_heads", 8),
            "d_head": settings.optional_size("head_dim") or d_model // n_heads,
            "rotation_base": base,
            "window": None,
            "qk_norm": epsilon,
        },
    }
    return _shape_of([_OF_LFM2[kind] for kind in kinds], options, d_hidden, epsilon)


def _lfm2_channels(settings: Settings) -> int:
    """Hidden channels of the feed-forward networks: two thirds of what config.json says, rounded up."""
    n_channels, multiple = settings.size("intermediate_size", 12288), settings.size("block_multiple_of", 256)
    adjusted = int(settings.channels("block_ffn_dim_multiplier", 1.0, int(2 * n_channels / 3)))
    return -(-adjusted // multiple) * multiple if settings.flag("block_auto_adjust_ff_dim", True) else n_channels


def _lfm2_rules(block: Block) -> list[Rule]:
    theirs = f"model.layers.{block.number}."
    experts = expert_rules(block, f"{theirs}feed_forward.experts.", _GATED)
    if block.mixer == "short-conv":
        return [*plain_rules(_SHORT, block.own, f"{theirs}conv."), *experts]
    norms = {"query_norm": "q_layernorm", "key_norm": "k_layernorm"}
    theirs += "self_attn."
    return [*attention_rules(block, theirs, output="out_proj"), *head_norm_rules(block, norms, theirs), *experts]


def _lfm2_settings(config: LanguageModelConfig, options: _Options) -> dict[str, Any]:
    absent = mixer_options("rotary-attention") | {"n_heads": 1}
    attention = options.get("rotary-attention", absent)
    n_heads, n_kv_heads, d_head = heads_of(Block(0, "rotary-attention", attention, config.d_model))
    return {
        "intermediate_size": max(config.d_channel_mixing, 1),
        "block_auto_adjust_ff_dim": False,
        "layer_types": _kinds(config, _OF_LFM2),
        "conv_L_cache": options["short-conv"]["kernel_size"],
        "conv_bias": options["short-conv"]["biases"],
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "head_dim": d_head,
        "rope_parameters": {"rope_type": "default", "rope_theta": attention["rotation_base"]},
        "norm_eps": config.norm_epsilon,
    }


def _lfm2_moe_settings(config: LanguageModelConfig, options: _Options) -> dict[str, Any]:
    entries, experts = _lfm2_settings(config, options), experts_of(config)
    del entries["block_auto_adjust_ff_dim"]
    return {
        **entries,
        **written(experts, _EXPERTS_OF_LFM2),
        "num_dense_layers": config.feed_forwards.index(EXPERTS),
        "norm_topk_prob": experts["normalise"],
        "routed_scaling_factor": experts["scale"],
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
    fits=lambda config: EXPERTS not in config.feed_forwards,
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
    fits=lambda config: EXPERTS in config.feed_forwards,
    other_names={"tie_embedding": "tie_word_embeddings"},
)
