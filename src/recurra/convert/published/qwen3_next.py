"""Qwen3-Next as transformers' Qwen3NextForCausalLM has it, with dense feed-forward networks alone."""

from typing import Any

import torch
from torch import Tensor

from recurra.checks import require, sentence
from recurra.convert.published._rules import (
    SWIGLU,
    Architecture,
    Fused,
    Rule,
    attention_heads,
    one_more,
    plain_rules,
    qkv_rule,
    reordered,
    stacked,
    take_rotation,
    turned_pairs,
)
from recurra.convert.published._settings import MOST_LAYERS, Settings, hybrid_config
from recurra.models.language_model import LanguageModelConfig

_LINEAR, _ATTENTION = "gated-delta-net", "gated-attention"
_KINDS = {"linear_attention": _LINEAR, "full_attention": _ATTENTION}
_OF_EXPERTS = (
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_experts_per_tok",
    "output_router_logits",
    "router_aux_loss_coef",
    "shared_expert_intermediate_size",
)
_ROTATED_SHARE = 0.25


def _config(settings: Settings) -> LanguageModelConfig:
    d_model, n_layer = settings.size("hidden_size", 2048), settings.size("num_hidden_layers", 48, most=MOST_LAYERS)
    kinds = settings.words("layer_types", _KINDS)
    interval = settings.size("full_attention_interval", 4)
    kinds = kinds or [list(_KINDS)[(number + 1) % interval == 0] for number in range(n_layer)]
    require(len(kinds) == n_layer, "layer_types", kinds, f"one of {', '.join(_KINDS)} for each of {n_layer} layers")
    _refuse_experts(settings, n_layer)
    settings.only("hidden_act", "silu", "swish")
    settings.only("attention_bias", False)
    settings.ignore("max_position_embeddings")
    epsilon = settings.number("rms_norm_eps", 1e-6)
    options = {_LINEAR: _linear_options(settings, epsilon), _ATTENTION: _attention_options(settings, epsilon)}
    mixers = [_KINDS[kind] for kind in kinds]
    return hybrid_config(
        settings, mixers, options, d_model=d_model, norm_epsilon=epsilon, vocab_size=151936, d_channel_mixing=5632
    )


def _refuse_experts(settings: Settings, n_layer: int) -> None:
    dense, step = set(settings.numbers("mlp_only_layers")), settings.size("decoder_sparse_step", 1)
    n_experts = settings.size("num_experts", 512, least=0)
    settings.ignore(*_OF_EXPERTS)
    sparse = [number for number in range(n_layer) if number not in dense and (number + 1) % step == 0]
    if n_experts and sparse:
        got = f"{n_experts} in {len(sparse)} of {n_layer} layers"
        hint = "mixtures of experts are not supported"
        raise ValueError(sentence("num_experts", got, "0, or all layers in mlp_only_layers", hint))


def _linear_options(settings: Settings, epsilon: float) -> dict[str, Any]:
    n_qk_heads, n_heads = settings.size("linear_num_key_heads", 16), settings.size("linear_num_value_heads", 32)
    return {
        "n_heads": n_heads,
        "n_qk_heads": n_qk_heads,
        "d_qk": n_qk_heads * settings.size("linear_key_head_dim", 128),
        "d_v": n_heads * settings.size("linear_value_head_dim", 128),
        "kernel_size": settings.size("linear_conv_kernel_dim", 4),
        "norm_epsilon": epsilon,
    }


def _attention_options(settings: Settings, epsilon: float) -> dict[str, Any]:
    theta, share = take_rotation(settings, _ROTATED_SHARE)
    return {
        "n_heads": settings.size("num_attention_heads", 16),
        "n_kv_heads": settings.size("num_key_value_heads", 2),
        "d_head": settings.size("head_dim", 256),
        "rotated_share": share,
        "rotation_base": theta,
        "window": None,
        "dropout": settings.number("attention_dropout", 0.0),
        "norm_epsilon": epsilon,
    }


def _rules(config: LanguageModelConfig) -> list[Rule]:
    own, theirs = r"blocks\.(\d+)", r"model.layers.\1"
    rules = [
        Rule(r"embedding\.weight", ("model.embed_tokens.weight",)),
        one_more(rf"{own}\.norm_mixing\.weight", rf"{theirs}.input_layernorm.weight"),
        one_more(rf"{own}\.norm_feed_forward\.weight", rf"{theirs}.post_attention_layernorm.weight"),
        *plain_rules(rf"{own}\.feed_forward", rf"{theirs}.mlp", SWIGLU, ".weight"),
        one_more(r"norm\.weight", "model.norm.weight"),
        Rule(r"head\.weight", ("lm_head.weight",)),
    ]
    for number, (name, options) in enumerate(config.mixers):
        rules += (_linear if name == _LINEAR else _attention)(number, config.d_model, options)
    return rules


def _linear(number: int, d_model: int, options: dict[str, Any]) -> list[Rule]:
    own, theirs = rf"blocks\.{number}\.mixer", f"model.layers.{number}.linear_attn"
    d_qk, d_v = (_sizes(d_model, options)[name] for name in ("d_qk", "d_v"))
    qkvz, ba = (fused.names for fused in _fused_of_linear(number, d_model, options))
    names = {
        "convolution.weight": "conv1d.weight",
        "A_log": "A_log",
        "dt_bias": "dt_bias",
        "norm.weight": "norm.weight",
        "output_projection.weight": "out_proj.weight",
    }
    return [
        stacked(rf"{own}\.qkv\.weight", qkvz[:3], [d_qk, d_qk, d_v]),
        Rule(rf"{own}\.gate_projection\.weight", (qkvz[3],)),
        Rule(rf"{own}\.rate_projection\.weight", (ba[0],)),
        Rule(rf"{own}\.decay_projection\.weight", (ba[1],)),
        *plain_rules(own, theirs, names),
    ]


def _attention(number: int, d_model: int, options: dict[str, Any]) -> list[Rule]:
    own, theirs = rf"blocks\.{number}\.mixer", f"model.layers.{number}.self_attn"
    n_heads, n_kv_heads, d_head, share = _heads(d_model, options)
    order = turned_pairs(d_head, int(d_head * share))
    q, gate = _fused_of_attention(number, d_model, options)[0].names
    qkv = q, f"{theirs}.k_proj.weight", f"{theirs}.v_proj.weight"
    return [
        qkv_rule(rf"{own}\.qkv\.weight", qkv, n_heads, n_kv_heads, order),
        Rule(rf"{own}\.gate_projection\.weight", (gate,)),
        Rule(rf"{own}\.output_projection\.weight", (f"{theirs}.o_proj.weight",)),
        _norm_rule(rf"{own}\.query_norm\.weight", f"{theirs}.q_norm.weight", order),
        _norm_rule(rf"{own}\.key_norm\.weight", f"{theirs}.k_norm.weight", order),
    ]


def _norm_rule(own: str, theirs: str, order: Tensor) -> Rule:
    back = torch.argsort(order)
    return Rule(own, (theirs,), lambda x: reordered(x, order) + 1, lambda x: (reordered(x, back) - 1,))


def _fused(config: LanguageModelConfig) -> list[Fused]:
    return [
        fused
        for number, (name, options) in enumerate(config.mixers)
        for fused in (_fused_of_linear if name == _LINEAR else _fused_of_attention)(number, config.d_model, options)
    ]


def _fused_of_linear(number: int, d_model: int, options: dict[str, Any]) -> list[Fused]:
    theirs, sizes = f"model.layers.{number}.linear_attn", _sizes(d_model, options)
    n_groups = sizes["n_qk_heads"]
    d_k, d_v, shared_by = sizes["d_qk"] // n_groups, sizes["d_v"] // n_groups, sizes["n_heads"] // n_groups
    return [
        Fused(f"{theirs}.in_proj_qkvz.weight", ("q", "k", "v", "z"), n_groups, (d_k, d_k, d_v, d_v)),
        Fused(f"{theirs}.in_proj_ba.weight", ("b", "a"), n_groups, (shared_by, shared_by)),
    ]


def _fused_of_attention(number: int, d_model: int, options: dict[str, Any]) -> list[Fused]:
    n_heads, _, d_head, _ = _heads(d_model, options)
    return [Fused(f"model.layers.{number}.self_attn.q_proj.weight", ("q", "gate"), n_heads, (d_head, d_head))]


def _sizes(d_model: int, options: dict[str, Any]) -> dict[str, int]:
    """The sizes of a Gated DeltaNet, with its own defaults."""
    n_heads = options.get("n_heads", 6)
    d_qk = options.get("d_qk") or n_heads * max(1, 3 * d_model // (4 * n_heads))
    n_qk_heads = options.get("n_qk_heads") or n_heads
    return {"n_heads": n_heads, "n_qk_heads": n_qk_heads, "d_qk": d_qk, "d_v": options.get("d_v") or 2 * d_qk}


def _heads(d_model: int, options: dict[str, Any]) -> tuple[int, int, int, float]:
    """Heads of queries, of keys and values, their channels, and the share that turns."""
    n_heads, n_kv_heads = attention_heads(options)
    return n_heads, n_kv_heads, options.get("d_head") or d_model // n_heads, options.get("rotated_share", 1.0)


def _settings(config: LanguageModelConfig) -> dict[str, Any]:
    kinds, options = {name: kind for kind, name in _KINDS.items()}, dict(config.mixers)
    linear, attention = options.get(_LINEAR, {}), options.get(_ATTENTION, {"window": None})
    _require_published(config, linear, attention)
    sizes, (n_heads, n_kv_heads, d_head, share) = _sizes(config.d_model, linear), _heads(config.d_model, attention)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": max(config.d_channel_mixing, 1),
        "num_hidden_layers": config.n_layer,
        "layer_types": [kinds.get(name, name) for name, _ in config.mixers],
        "mlp_only_layers": list(range(config.n_layer)),
        "linear_num_key_heads": sizes["n_qk_heads"],
        "linear_num_value_heads": sizes["n_heads"],
        "linear_key_head_dim": sizes["d_qk"] // sizes["n_qk_heads"],
        "linear_value_head_dim": sizes["d_v"] // sizes["n_heads"],
        "linear_conv_kernel_dim": linear.get("kernel_size", 4),
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "head_dim": d_head,
        "attention_dropout": attention.get("dropout", 0.0),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": attention.get("rotation_base", 10000.0),
            "partial_rotary_factor": share,
        },
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _require_published(config: LanguageModelConfig, linear: dict[str, Any], attention: dict[str, Any]) -> None:
    """Refuse options that transformers' class does not have."""
    what = f"of a Qwen3NextForCausalLM with norm_epsilon {config.norm_epsilon}"
    names = [name for name, _ in config.mixers]
    if _LINEAR in names:
        epsilon, negative = linear.get("norm_epsilon", 1e-5), linear.get("negative_eigenvalues", False)
        require(epsilon == config.norm_epsilon, "norm_epsilon", epsilon, f"that {what}")
        require(not negative, "negative_eigenvalues", negative, f"False, as {what}")
    if _ATTENTION in names:
        epsilon, window = attention.get("norm_epsilon", 1e-6), attention.get("window", 128)
        require(epsilon == config.norm_epsilon, "norm_epsilon", epsilon, f"that {what}")
        require(window is None, "window", window, f"None, as {what}")
        bias = attention.get("output_bias", False)
        require(not bias, "output_bias", bias, f"False, as {what}")


QWEN3_NEXT = Architecture("qwen3_next", "Qwen3NextForCausalLM", _LINEAR, _config, _rules, _settings, fused=_fused)
