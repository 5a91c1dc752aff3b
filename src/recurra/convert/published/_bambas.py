"""Mamba-2 and attention: transformers' BambaForCausalLM, GraniteMoeHybridForCausalLM, FalconH1ForCausalLM and
NemotronHForCausalLM.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recurra.checks import require
from recurra.convert.published._mambas import ATTENTION, JAMBA, NO_LIMIT, PARTS_OF_MAMBA2, heads_of_mamba2
from recurra.convert.published._rules import (
    EXPERTS,
    Architecture,
    Block,
    Fused,
    Rule,
    Stack,
    deepseek_experts,
    networks_of,
    plain_rules,
    shape_of,
)
from recurra.convert.published._settings import Settings, written
from recurra.layers.state_space import most_heads
from recurra.models.language_model import LanguageModelConfig

# --- Bamba (ibm-ai-platform/Bamba-9B) ---

_SIZES_OF_BAMBA = {
    "d_state": ("mamba_d_state", 256),
    "d_conv": ("mamba_d_conv", 4),
    "n_groups": ("mamba_n_groups", 1),
    "expand": ("mamba_expand", 2),
    "n_heads": ("mamba_n_heads", 128),
}


def _bamba_config(settings: Settings, d_model: int, n_layer: int) -> dict[str, Any]:
    attends = set(settings.numbers("attn_layer_indices") or ())
    mixers = [ATTENTION if number in attends else "mamba2" for number in range(n_layer)]
    kinds = ["full_attention" if name == ATTENTION else "linear_attention" for name in mixers]
    settings.only(layer_types=kinds, layers_block_type=kinds, mlp_bias=False)
    settings.ignore("z_loss_coefficient")
    rotation = settings.rotation(0.5)
    require(rotation[1] == 0.5, "partial_rotary_factor", rotation[1], "0.5, as transformers' class has it")
    d_hidden = settings.size("intermediate_size", 14336)
    return _mamba2_and_attention(settings, d_model, d_hidden, mixers, rotation, n_kv_heads=8, epsilon=1e-5)


def _mamba2_and_attention(
    settings: Settings, d_model: int, d_hidden: int, mixers: list[str], rotation: tuple[float, float], **defaults: Any
) -> dict[str, Any]:
    """Take what says how a stack of these mixers computes, with dense feed-forward networks."""
    settings.only(hidden_act=("silu", "swish"), mamba_conv_bias=True, mamba_proj_bias=False, attention_bias=False)
    settings.only(time_step_limit=NO_LIMIT)
    settings.ignore("mamba_chunk_size max_position_embeddings num_logits_to_keep")
    sizes, epsilon = settings.options(_SIZES_OF_BAMBA), settings.number("rms_norm_eps", defaults["epsilon"])
    inner = sizes["expand"] * d_model
    got = sizes["n_heads"] * (settings.optional_size("mamba_d_head", absent="auto") or inner // sizes["n_heads"])
    require(got == inner, "mamba_n_heads * mamba_d_head", got, f"mamba_expand * hidden_size = {inner}")
    attention = settings.attention(d_model, defaults["n_kv_heads"])
    attention |= {"rotated_share": rotation[1], "rotation_base": rotation[0]}
    return shape_of(mixers, {"mamba2": sizes | {"norm_epsilon": epsilon}, ATTENTION: attention}, d_hidden, epsilon)


def _bamba_rules(block: Block) -> list[Rule]:
    theirs = f"model.layers.{block.number}"
    if block.mixer == ATTENTION:
        return block.attention(f"{theirs}.self_attn.")
    return block.plain(PARTS_OF_MAMBA2, f"{theirs}.mamba.")


def _bamba_settings(stack: Stack) -> dict[str, Any]:
    mamba = stack.mixer("mamba2")
    return {
        **written(mamba | {"n_heads": heads_of_mamba2(stack, mamba)}, _SIZES_OF_BAMBA),
        "intermediate_size": stack.config.d_channel_mixing,
        "attn_layer_indices": [number for number, name in enumerate(stack.mixers) if name == ATTENTION],
        **stack.attention(ATTENTION, n_heads=1),
        "rope_parameters": {"rope_type": "default", "rope_theta": stack.mixer(ATTENTION)["rotation_base"]},
        "rms_norm_eps": stack.config.norm_epsilon,
    }


BAMBA = JAMBA._replace(
    model_type="bamba",
    mixer="mamba2",
    config=_bamba_config,
    settings=_bamba_settings,
    rules=_bamba_rules,
    fits=lambda stack: stack.config.d_channel_mixing > 0 and not _is_granite(stack),
)


# --- Granite 4.0 (ibm-granite/granite-4.0-h-350m, -1b, -micro: dense; -h-tiny, -h-small: experts) ---

_KINDS = {"linear_attention": "mamba2", "full_attention": ATTENTION, "mamba": "mamba2", "attention": ATTENTION}


def _granite_config(settings: Settings, d_model: int, n_layer: int) -> dict[str, Any]:
    mixers = settings.layers("layer_types", _KINDS, ["mamba"] * n_layer)
    settings.only(normalization_function="rmsnorm", mlp_bias=False)
    settings.ignore("init_method output_router_logits router_aux_loss_coef")
    rotates = settings.word("position_embedding_type", [None, "nope", "rope"]) == "rope"
    base = settings.whole_rotation()
    n_experts, top_k = settings.size("num_local_experts", 8, least=0), settings.size("num_experts_per_tok", 2, least=0)
    d_expert, d_shared = settings.size("intermediate_size", 11008), settings.size("shared_intermediate_size", 1024)
    experts = {"n_experts": n_experts, "top_k": top_k, "d_shared": d_shared}
    d_hidden, rotation = d_expert if n_experts else d_shared, (base, float(rotates))
    shape = _mamba2_and_attention(settings, d_model, d_hidden, mixers, rotation, n_kv_heads=None, epsilon=1e-6)
    scale = settings.positive("attention_multiplier")
    if ATTENTION in shape["mixer_options"]:
        attention = shape["mixer_options"][ATTENTION]
        attention["query_scale"] = scale * attention["d_head"] ** 0.5
    return {
        **shape,
        **networks_of([EXPERTS if n_experts else "swiglu"], experts),
        "embedding_scale": settings.positive("embedding_multiplier"),
        "residual_scale": settings.positive("residual_multiplier"),
        "logit_scale": 1 / settings.positive("logits_scaling"),
    }


def _granite_rules(block: Block) -> list[Rule]:
    (network,) = _granite_fused(block)
    inner = "shared." if block.n_experts else ""
    split = {f"{inner}{part}.weight": name for part, name in zip(network.parts, network.names)}
    return [*_bamba_rules(block), *plain_rules(split, block.own_network)]


def _granite_fused(block: Block) -> list[Fused]:
    d_hidden, name = block.d_shared or block.d_hidden, f"model.layers.{block.number}.shared_mlp.input_linear.weight"
    return [Fused(name, ("gate", "up"), 1, (d_hidden, d_hidden))]


def _granite_settings(stack: Stack) -> dict[str, Any]:
    entries, attention = _bamba_settings(stack), stack.mixer(ATTENTION, rotated_share=0.0)
    del entries["attn_layer_indices"]
    config, experts, is_dense = stack.config, stack.experts, not stack.has_experts
    return {
        **entries,
        "layer_types": ["full_attention" if name == ATTENTION else "linear_attention" for name in stack.mixers],
        "position_embedding_type": "rope" if attention["rotated_share"] else None,
        "attention_multiplier": attention["query_scale"] * entries["head_dim"] ** -0.5,
        "num_local_experts": 0 if is_dense else experts["n_experts"],
        "num_experts_per_tok": 0 if is_dense else experts["top_k"],
        "intermediate_size": experts["d_expert"],
        "shared_intermediate_size": config.d_channel_mixing if is_dense else max(experts["d_shared"], 1),
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": 1 / config.logit_scale,
    }


def _is_granite(stack: Stack) -> bool:
    """Whether a stack of these mixers has what Bamba's have not."""
    scales = (stack.config.embedding_scale, stack.config.residual_scale, stack.config.logit_scale)
    attention = stack.mixer(ATTENTION, rotated_share=0.5)
    is_bamba = attention["query_scale"] == 1 and attention["rotated_share"] == 0.5 and scales == (1, 1, 1)
    return not is_bamba or stack.has_experts


GRANITE = BAMBA._replace(
    model_type="granitemoehybrid",
    names={
        "embedding": "model.embed_tokens",
        "blocks.#.norm_mixing": "model.layers.#.input_layernorm",
        "blocks.#.norm_feed_forward": "model.layers.#.post_attention_layernorm",
        "blocks.#.feed_forward.down": "model.layers.#.shared_mlp.output_linear",
        "blocks.#.feed_forward.shared.down": "model.layers.#.shared_mlp.output_linear",
        "blocks.#.feed_forward.router": "model.layers.#.block_sparse_moe.router.layer",
        "blocks.#.feed_forward.experts.gate_up": "model.layers.#.block_sparse_moe.input_linear",
        "blocks.#.feed_forward.experts.down": "model.layers.#.block_sparse_moe.output_linear",
        "norm": "model.norm",
        "head": "lm_head",
        "head.linear": "lm_head",
    },
    config=_granite_config,
    settings=_granite_settings,
    rules=_granite_rules,
    fused=_granite_fused,
    fits=lambda stack: stack.config.d_channel_mixing > 0,
    other_names={"layers_block_type": "layer_types"},
)


# --- Falcon-H1 (tiiuae/Falcon-H1-0.5B-Base to -34B) ---

_PARALLEL = "mamba2-attention"
_SIZES_OF_FALCON_H1 = {
    "d_state": ("mamba_d_state", 256),
    "d_conv": ("mamba_d_conv", 4),
    "n_groups": ("mamba_n_groups", 1),
    "n_mamba_heads": ("mamba_n_heads", 128),
}
_FOLDED = (
    *("attention_in_multiplier", "attention_out_multiplier", "key_multiplier"),
    *("ssm_in_multiplier", "ssm_out_multiplier"),
)


def _falcon_h1_config(settings: Settings, d_model: int, n_layer: int) -> dict[str, Any]:
    settings.only(hidden_act=("silu", "swish"), mamba_conv_bias=True, mamba_proj_bias=False, attention_bias=False)
    settings.only(mlp_bias=False, projectors_bias=False, mamba_use_mlp=True, time_step_limit=NO_LIMIT)
    settings.only(layers_block_type=["hybrid"] * n_layer, attn_layer_indices=None, sliding_window=None)
    settings.ignore("mamba_chunk_size max_position_embeddings num_logits_to_keep mlp_expansion_factor")
    for name in _FOLDED:
        settings.positive(name)
    settings.factors("mlp_multipliers", 2)
    settings.factors("ssm_multipliers", 5)
    sizes, epsilon = settings.options(_SIZES_OF_FALCON_H1), settings.number("rms_norm_eps", 1e-5)
    base = settings.whole_rotation()
    inner = settings.size("mamba_expand", 2) * d_model
    inner = settings.optional_size("mamba_d_ssm", 1024) or inner
    heads = sizes["n_mamba_heads"]
    got = heads * (settings.optional_size("mamba_d_head", absent="auto") or inner // heads)
    require(got == inner, "mamba_n_heads * mamba_d_head", got, f"mamba_d_ssm = {inner}")
    has_norm, is_first = settings.flag("mamba_rms_norm", False), settings.flag("mamba_norm_before_gate", True)
    options = {
        **sizes,
        "d_inner": inner,
        "norm": ("before" if is_first else "after") if has_norm else None,
        "norm_epsilon": epsilon,
        **settings.attention(d_model),
        "rotation_base": base,
    }
    return {
        "d_channel_mixing": settings.size("intermediate_size", 14336),
        "mixer_options": options,
        "feed_forward": "swiglu",
        "norm_epsilon": epsilon,
        "embedding_scale": settings.positive("embedding_multiplier"),
        "logit_scale": settings.positive("lm_head_multiplier"),
    }


def _falcon_h1_folded(entries: Mapping[str, Any], config: LanguageModelConfig) -> dict[str, Tensor]:
    """The multipliers inside of blocks, which are products with rows of matrices."""
    attention_in, attention_out, key, ssm_in, ssm_out = (entries.get(name, 1.0) for name in _FOLDED)
    gate, down = entries.get("mlp_multipliers") or (1.0, 1.0)
    options = Stack(config).mixer(_PARALLEL)
    d_selection = options["n_groups"] * options["d_state"]
    rows = torch.tensor([options["d_inner"], options["d_inner"], d_selection, d_selection, options["n_mamba_heads"]])
    parts = torch.tensor(entries.get("ssm_multipliers") or [1.0] * 5, dtype=torch.float32).double()  # as there
    factors = {
        "feed_forward.gate_proj": gate,
        "feed_forward.down_proj": down,
        "self_attn.q_proj": attention_in,
        "self_attn.k_proj": attention_in * key,
        "self_attn.v_proj": attention_in,
        "self_attn.o_proj": attention_out,
        "mamba.out_proj": ssm_out,
    }
    whole = {name: torch.tensor([factor], dtype=torch.float64) for name, factor in factors.items()}
    whole["mamba.in_proj"] = ssm_in * parts.repeat_interleave(rows)
    return {rf"model\.layers\.\d+\.{re.escape(name)}\.weight": factor for name, factor in whole.items()}


def _falcon_h1_rules(block: Block) -> list[Rule]:
    theirs = f"model.layers.{block.number}"
    mamba, attention = (block._replace(part=part) for part in ("mamba.", "attention."))
    return [*attention.attention(f"{theirs}.self_attn."), *mamba.plain(PARTS_OF_MAMBA2, f"{theirs}.mamba.")]


def _falcon_h1_settings(stack: Stack) -> dict[str, Any]:
    own, config = stack.mixer(_PARALLEL), stack.config
    inner = own["d_inner"] or 2 * config.d_model
    n_mamba_heads = own["n_mamba_heads"] or most_heads(inner, 64)
    return {
        **written(own | {"n_mamba_heads": n_mamba_heads}, _SIZES_OF_FALCON_H1),
        "mamba_d_ssm": inner,
        "mamba_d_head": inner // n_mamba_heads,
        "mamba_rms_norm": own["norm"] is not None,
        "mamba_norm_before_gate": own["norm"] != "after",
        "intermediate_size": config.d_channel_mixing,
        **stack.attention(_PARALLEL),
        "rope_parameters": {"rope_type": "default", "rope_theta": own["rotation_base"]},
        "rms_norm_eps": config.norm_epsilon,
        "embedding_multiplier": config.embedding_scale,
        "lm_head_multiplier": config.logit_scale,
    }


FALCON_H1 = JAMBA._replace(
    model_type="falcon_h1",
    mixer=_PARALLEL,
    names={**JAMBA.names, "head.linear": "lm_head"},
    config=_falcon_h1_config,
    settings=_falcon_h1_settings,
    rules=_falcon_h1_rules,
    folded=_falcon_h1_folded,
)


# --- Nemotron-H (nvidia/Nemotron-H-8B-Base-8K, NVIDIA-Nemotron-Nano-9B-v2; with experts -Nemotron-3-Nano-30B-A3B) ---

_OF_NEMOTRON = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_NETWORKS_OF_NEMOTRON = {"mlp": "relu-squared", "moe": EXPERTS}
_SIZES_OF_NEMOTRON = {
    "d_state": ("ssm_state_size", 128),
    "d_conv": ("conv_kernel", 4),
    "n_groups": ("n_groups", 8),
    "n_heads": ("mamba_num_heads", 128),
}
_MIXTURE_OF_NEMOTRON = {
    "feed_forward.router.bias": "mixer.gate.e_score_correction_bias",
    "feed_forward.router": "mixer.gate",
    "feed_forward.to_latent": "mixer.fc1_latent_proj",
    "feed_forward.from_latent": "mixer.fc2_latent_proj",
}
_EXPERTS_OF_NEMOTRON = {
    "n_experts": ("n_routed_experts", 8),
    "top_k": ("num_experts_per_tok", 2),
    "d_expert": ("moe_intermediate_size", 7688),
    "d_shared": ("moe_shared_expert_intermediate_size", 7688),
    "n_groups": ("n_group", 1),
    "top_groups": ("topk_group", 1),
}
_HOW_NEMOTRON_RUNS = """
attention_head_dim chunk_size expand hidden_dropout mamba_ssm_cache_dtype max_position_embeddings
moe_shared_expert_overlap mtp_hybrid_override_pattern mtp_layers_block_type n_shared_experts norm_eps
num_logits_to_keep num_nextn_predict_layers output_router_logits partial_rotary_factor rescale_prenorm_residual
residual_in_fp32 rms_norm_eps rope_theta time_step_floor time_step_max time_step_rank use_mamba_kernels
"""
"""The class has one shared expert and no positions, and the epsilon of its norms is layer_norm_epsilon."""


def _nemotron_config(settings: Settings, d_model: int, n_layer: int) -> dict[str, Any]:
    mixers, networks = _nemotron_blocks(settings)
    settings.only(mamba_hidden_act=("silu", "swish"), mlp_hidden_act="relu2", sliding_window=None, use_conv_bias=True)
    settings.only(attention_bias=False, mamba_proj_bias=False, mlp_bias=False, use_bias=False)
    settings.only(time_step_limit=NO_LIMIT)  # the class limits steps by time_step_min
    settings.ignore(_HOW_NEMOTRON_RUNS)
    sizes, epsilon = settings.options(_SIZES_OF_NEMOTRON), settings.number("layer_norm_epsilon", 1e-5)
    experts = deepseek_experts(settings, _EXPERTS_OF_NEMOTRON) | {"expert": "relu-squared"}
    experts["d_latent"], d_head = settings.optional_size("moe_latent_size") or 0, settings.size("head_dim", 128)
    options = {
        "mamba2": {
            **sizes,
            "d_inner": sizes["n_heads"] * settings.size("mamba_head_dim", 64),
            "norm_epsilon": epsilon,
            "least_step": settings.positive("time_step_min", 0.001),
        },
        ATTENTION: settings.attention(d_model) | {"d_head": d_head, "rotated_share": 0.0},
    }
    shape = shape_of(mixers, options, settings.size("intermediate_size", 21504), epsilon)
    return {"n_layer": len(mixers), **shape, **networks_of(networks, experts)}


def _nemotron_blocks(settings: Settings) -> tuple[list[str], list[str]]:
    """Make blocks of layers, each a mixer or a feed-forward network, which belongs to the mixer before it."""
    pattern = settings.text("hybrid_override_pattern", "".join(_OF_NEMOTRON))
    layers = settings.words("layers_block_type", [*_KINDS, *_NETWORKS_OF_NEMOTRON])
    layers = layers or [_OF_NEMOTRON[letter] for letter in pattern or "ME*-"]
    expected = "mixers and feed-forward networks, each network after a mixer"
    mixers: list[str] = []
    networks: list[str] = []
    for layer in layers:
        if layer in _KINDS:
            mixers.append(_KINDS[layer])
            networks.append("none")
        else:
            require(networks[-1:] == ["none"], "layers_block_type", layers, expected)
            networks[-1] = _NETWORKS_OF_NEMOTRON[layer]
    return mixers, networks


def _nemotron_rules(block: Block) -> list[Rule]:
    theirs, after = (f"backbone.layers.{block.place + number}." for number in (0, 1))
    own, mixer = f"blocks.{block.number}.", f"{theirs}mixer."
    inner = "mixer.shared_experts." if block.n_experts else "mixer."
    parts = {"norm_feed_forward": "norm", "feed_forward.0": f"{inner}up_proj", "feed_forward.3": f"{inner}down_proj"}
    parts |= {own.replace(".", ".shared."): name for own, name in parts.items() if "." in own and block.n_experts}
    return [
        *plain_rules({"norm_mixing": "norm"}, own, theirs),
        *(block.attention(mixer) if block.mixer == ATTENTION else block.plain(PARTS_OF_MAMBA2, mixer)),
        *(plain_rules(parts | _MIXTURE_OF_NEMOTRON, own, after) if block.has_network else []),
        *block.experts(f"{after}mixer.experts.", {"up": "up_proj", "down": "down_proj"}),
    ]


def _nemotron_settings(stack: Stack) -> dict[str, Any]:
    mamba, config, experts = stack.mixer("mamba2"), stack.config, stack.experts
    inner = mamba["d_inner"] or mamba["expand"] * config.d_model
    heads, layers = mamba["n_heads"] or most_heads(inner, 64), []
    for name, network in zip(stack.mixers, config.feed_forwards):
        layers.append("full_attention" if name == ATTENTION else "linear_attention")
        layers += [kind for kind, own in _NETWORKS_OF_NEMOTRON.items() if own == network]
    return {
        **written(mamba | {"n_heads": heads}, _SIZES_OF_NEMOTRON),
        **written(experts | {"d_shared": max(experts["d_shared"], 1)}, _EXPERTS_OF_NEMOTRON),
        "norm_topk_prob": experts["normalise"],
        "routed_scaling_factor": experts["scale"],
        "moe_latent_size": experts["d_latent"] or None,
        "num_hidden_layers": len(layers),
        "layers_block_type": layers,
        "mamba_head_dim": inner // heads,
        "time_step_min": mamba["least_step"],
        "intermediate_size": config.d_channel_mixing,
        **stack.attention(ATTENTION, n_heads=1),
        "layer_norm_epsilon": config.norm_epsilon,
    }


def _has_squares(stack: Stack) -> bool:
    of_experts = stack.has_experts and stack.experts["expert"] == "relu-squared"
    return of_experts or "relu-squared" in stack.config.feed_forwards


NEMOTRON_H = Architecture(
    model_type="nemotron_h",
    mixer="mamba2",
    names={"embedding": "backbone.embeddings", "norm": "backbone.norm_f", "head": "lm_head"},
    config=_nemotron_config,
    settings=_nemotron_settings,
    rules=_nemotron_rules,
    fits=lambda stack: _has_squares(stack) and not stack.config.tie_embeddings,  # the class ignores tying
    counts_layers=False,
    other_names={"layer_types": "layers_block_type"},
    other_tensors={"model.": "backbone."},
)
