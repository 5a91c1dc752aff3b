"""Other linear attention, softmax attention and experts: transformers' KimiLinearForCausalLM and MiniMaxForCausalLM."""

import re
from typing import Any

import torch
from torch import Tensor

from recurra.checks import require, sentence
from recurra.convert.published._rules import (
    EXPERTS,
    NORMS,
    STACK,
    SWIGLU,
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

_NAMES_OF_EXPERTS = {"gate": "w1", "up": "w3", "down": "w2"}

# --- Kimi Linear (moonshotai/Kimi-Linear-48B-A3B-Instruct) ---

_KDA, _MLA = "kda", "mla"
_OF_KIMI = {"linear_attention": _KDA, "full_attention": _MLA}
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
_OPTIONS_OF_LATENT = {
    "n_heads": ("num_attention_heads", 32),
    "d_head": ("qk_nope_head_dim", 128),
    "d_value": ("v_head_dim", 128),
    "d_latent": ("kv_lora_rank", 512),
    "d_shared": ("qk_rope_head_dim", 64),
    "dropout": ("attention_dropout", 0.0),
}
_SIZES_OF_KIMIS_EXPERTS = {
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
    mixers, delta = _linear_layers(settings, n_layer)
    epsilon, latent = settings.number("rms_norm_eps", 1e-5), settings.options(_OPTIONS_OF_LATENT)
    settings.only(num_key_value_heads=(latent["n_heads"], None))
    latent |= {"d_query_latent": settings.optional_size("q_lora_rank"), "rotation_base": None, "window": None}
    n_dense = settings.size("first_k_dense_replace", 1, least=0)
    usual = ["dense" if number < n_dense else "sparse" for number in range(n_layer)]
    networks = settings.layers("mlp_layer_types", _NETWORKS, usual)
    experts = deepseek_experts(settings, _SIZES_OF_KIMIS_EXPERTS, 2.446)
    experts["d_shared"] = settings.size("num_shared_experts", 1) * experts["d_expert"]
    options = {_KDA: delta | {"norm_epsilon": epsilon}, _MLA: latent}
    shape = shape_of(mixers, options, settings.size("intermediate_size", 9216), epsilon)
    return {**shape, **networks_of(networks, experts)}


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
    mixers = whole.layers("layer_types", _OF_KIMI, kinds)
    agree = attending is None or mixers == [_OF_KIMI[kind] for kind in kinds]
    given = [list(_OF_KIMI)[name == _MLA] for name in mixers]
    require(agree, "layer_types", given, "the layers of linear_attn_config")
    return mixers, sizes


def _kimi_rules(block: Block) -> list[Rule]:
    layer = f"model.layers.{block.number}."
    theirs, mixture = f"{layer}self_attn.", f"{layer}block_sparse_moe."
    experts = block.experts(f"{mixture}experts.", _NAMES_OF_EXPERTS)
    rules = [*plain_rules(_MIXTURE, block.own_network, mixture), *experts]
    if block.mixer == _MLA:
        queries = {"queries": "q_b_proj" if block.options["d_query_latent"] else "q_proj"}
        return [*rules, *block.plain(_LATENT | queries, theirs)]
    rows = [block.options["d_qk"] or block.d_model] * 3
    return [
        *rules,
        block.stacked("qkv.weight", [f"{theirs}{part}_proj.weight" for part in "qkv"], rows),
        block.stacked("convolution.weight", [f"{theirs}{part}_conv1d.weight" for part in "qkv"], rows),
        *block.plain({"A_log": "A_log"}, theirs, lambda a: a.flatten(), lambda a: (a.view(1, 1, -1, 1),)),
        *block.plain(_DELTA, theirs),
    ]


def _usual_kimi(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename dense networks as in published files: transformers saves them under the mixtures' name, and loads both."""
    return {re.sub(r"\.block_sparse_moe\.(\w+_proj)\.", r".mlp.\1.", name): x for name, x in weights.items()}


def _kimi_settings(stack: Stack) -> dict[str, Any]:
    config, delta, latent, experts = stack.config, stack.mixer(_KDA), stack.mixer(_MLA), stack.experts
    d_head = latent["d_head"] or config.d_model // latent["n_heads"]
    usual = {"d_head": d_head, "d_value": d_head, "d_latent": 4 * d_head, "d_shared": max(2, d_head // 4 * 2)}
    networks = {own: kind for kind, own in _NETWORKS.items()}
    return {
        "intermediate_size": max(config.d_channel_mixing, 1),
        "layer_types": stack.kinds(_OF_KIMI),
        "mlp_layer_types": [networks.get(name, name) for name in config.feed_forwards],
        "linear_num_heads": delta["n_heads"],
        "linear_head_dim": (delta["d_qk"] or config.d_model) // delta["n_heads"],
        "linear_conv_kernel_dim": delta["kernel_size"],
        **written(latent | {own: latent[own] or size for own, size in usual.items()}, _OPTIONS_OF_LATENT),
        "num_key_value_heads": latent["n_heads"],
        "q_lora_rank": latent["d_query_latent"],
        **written(experts, _SIZES_OF_KIMIS_EXPERTS),
        "num_shared_experts": max(experts["d_shared"] // experts["d_expert"], 1),
        "moe_renormalize": experts["normalise"],
        "routed_scaling_factor": experts["scale"],
        "rms_norm_eps": config.norm_epsilon,
        "pad_token_id": None,  # the default exceeds a small vocabulary, which the class refuses
    }


KIMI_LINEAR = Architecture(
    model_type="kimi_linear",
    mixer=_KDA,
    names=STACK | NORMS,
    config=_kimi_config,
    settings=_kimi_settings,
    rules=_kimi_rules,
    fits=lambda stack: not stack.config.tie_embeddings,  # the class ignores tying
    other_names=_OTHER_NAMES,
    other_layout=_usual_kimi,
)


# --- MiniMax-01 (MiniMaxAI/MiniMax-Text-01-hf) ---

_LIGHTNING, _ROTARY = "lightning-attention", "rotary-attention"
_OF_MINIMAX = {"linear_attention": _LIGHTNING, "full_attention": _ROTARY}
_PARTS = {"gate_projection": "output_gate", "norm": "norm", "output_projection": "out_proj"}
_SIZES_OF_MINIMAX = {
    "n_experts": ("num_local_experts", 8),
    "top_k": ("num_experts_per_tok", 2),
    "d_expert": ("intermediate_size", 14336),
}
_HALVES = ("full_attn", "linear_attn", "mlp")
_BLOCK = 256


def _minimax_config(settings: Settings, d_model: int, n_layer: int) -> dict[str, Any]:
    settings.only(hidden_act=("silu", "swish"))
    settings.ignore("block_size max_position_embeddings output_router_logits router_aux_loss_coef router_jitter_noise")
    kinds = ["linear_attention" if number % 2 else "full_attention" for number in range(n_layer)]
    mixers = settings.layers("layer_types", _OF_MINIMAX, kinds)
    passed, added = _factors(settings, "alpha"), _factors(settings, "beta")
    attention, epsilon = settings.attention(d_model), settings.number("rms_norm_eps", 1e-5)
    attention |= {"rotation_base": settings.whole_rotation(1e6), "window": settings.optional_size("sliding_window")}
    options = {_LIGHTNING: {name: attention[name] for name in ("n_heads", "d_head")}, _ROTARY: attention}
    experts = settings.options(_SIZES_OF_MINIMAX)
    # the norms cancel alpha if all inputs to the residual stream are divided by it, and epsilon by its square
    return {
        **shape_of(mixers, options, experts["d_expert"], epsilon / passed**2),
        **networks_of([EXPERTS], experts),
        "norm_place": "stream",
        "embedding_scale": 1 / passed,
        "residual_scale": added / passed,
    }


def _factors(settings: Settings, name: str) -> float:
    """Read the factor of the residual (alpha) or of the branch's output (beta), which all half-blocks must share."""
    found = [settings.positive(f"{half}_{name}_factor") for half in _HALVES]
    names = ", ".join(f"{half}_{name}_factor" for half in _HALVES)
    require(len(set(found)) == 1, names, found, "one number: different ones are not supported")
    return found[0]


def _log_rate(slope: Tensor) -> Tensor:
    if not bool((slope > 0).all()):
        raise ValueError(sentence("slope_rate", f"one with {float(slope.min()):.3g}", "positive numbers"))
    return slope.flatten().log()


def _minimax_rules(block: Block) -> list[Rule]:
    layer = f"model.layers.{block.number}."
    theirs, mixture = f"{layer}self_attn.", f"{layer}block_sparse_moe."
    experts = block.experts(f"{mixture}experts.", _NAMES_OF_EXPERTS)
    rules = [*plain_rules({"router": "gate"}, block.own_network, mixture), *experts]
    if block.mixer == _ROTARY:
        return [*rules, *block.attention(theirs)]
    ((q, k, v),) = (fused.names for fused in _minimax_fused(block))
    n_heads, _, d_head = block.heads
    return [
        *rules,
        block.stacked("qkv.weight", [q, k, v], [n_heads * d_head] * 3),
        *block.plain({"log_rate": "slope_rate"}, theirs, _log_rate, lambda rate: (rate.exp().view(-1, 1, 1),)),
        *block.plain(_PARTS, theirs),
    ]


def _minimax_fused(block: Block) -> list[Fused]:
    if block.mixer == _ROTARY:
        return []
    n_heads, _, d_head = block.heads
    name = f"model.layers.{block.number}.self_attn.qkv_proj.weight"
    return [Fused(name, ("q", "k", "v"), n_heads, (d_head, d_head, d_head))]


def _without_powers(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop the precomputed powers of decays that the class stores for its blocks of steps."""
    powers = re.compile(r".*\.self_attn\.(query|key|diagonal)_decay")
    return {name: tensor for name, tensor in weights.items() if not powers.fullmatch(name)}


def _with_powers(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add the powers of decays, for blocks of the class's default length."""
    after = torch.arange(1, _BLOCK + 1, dtype=torch.float32)[:, None]
    weights = dict(weights)
    for name in [name for name in weights if name.endswith(".slope_rate")]:
        slope, beginning = weights[name], name.removesuffix("slope_rate")
        weights[f"{beginning}query_decay"] = torch.exp(-slope * after)
        weights[f"{beginning}key_decay"] = torch.exp(-slope * (_BLOCK - after))
        weights[f"{beginning}diagonal_decay"] = torch.exp(-slope * (after - after.T)).tril()[None]
    return weights


def _minimax_settings(stack: Stack) -> dict[str, Any]:
    config, linear = stack.config, stack.mixer(_LIGHTNING)
    passed, absent = 1 / config.embedding_scale, {"window": None, "n_heads": linear["n_heads"]}
    attention, (_, n_kv_heads, _) = stack.mixer(_ROTARY, **absent), stack.heads(_ROTARY, **absent)
    factors = {"alpha": passed, "beta": config.residual_scale * passed}
    return {
        **written(stack.experts, _SIZES_OF_MINIMAX),
        **{f"{half}_{name}_factor": factor for half in _HALVES for name, factor in factors.items()},
        "layer_types": stack.kinds(_OF_MINIMAX),
        "block_size": _BLOCK,
        "num_attention_heads": linear["n_heads"],
        "num_key_value_heads": n_kv_heads,
        "head_dim": linear["d_head"] or config.d_model // linear["n_heads"],
        "sliding_window": attention["window"],
        "attention_dropout": attention["dropout"],
        "rope_parameters": {"rope_type": "default", "rope_theta": attention["rotation_base"]},
        "rms_norm_eps": config.norm_epsilon * passed**2,
    }


MINIMAX = Architecture(
    model_type="minimax",
    mixer=_LIGHTNING,
    names=STACK | NORMS,
    config=_minimax_config,
    settings=_minimax_settings,
    rules=_minimax_rules,
    fused=_minimax_fused,
    other_names={"num_experts": "num_local_experts"},
    other_layout=_without_powers,
    derived=_with_powers,
)
