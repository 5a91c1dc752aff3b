"""Jamba as transformers' JambaForCausalLM has it, with dense feed-forward networks alone (AI21-Jamba-Reasoning-3B)."""

import math
from typing import Any

import torch

from recurra.checks import require, sentence
from recurra.convert.published._rules import SWIGLU, Architecture, Rule, attention_heads, plain_rules, qkv_rule
from recurra.convert.published._settings import MOST_LAYERS, Settings, hybrid_config
from recurra.convert.published.mamba import MIXER
from recurra.models.language_model import LanguageModelConfig

_MAMBA, _ATTENTION = "mamba", "rotary-attention"
_NORMS = {"step_norm": "dt_layernorm", "b_norm": "b_layernorm", "c_norm": "c_layernorm"}
_NORM_EPSILON = 1e-6
_WITHOUT_POSITIONS = {"rotated_share": 0.0, "window": None}


def _config(settings: Settings) -> LanguageModelConfig:
    d_model, n_layer = settings.size("hidden_size", 4096), settings.size("num_hidden_layers", 32, most=MOST_LAYERS)
    _refuse_experts(settings, n_layer)
    period, offset = settings.size("attn_layer_period", 8), settings.size("attn_layer_offset", 4, least=0)
    mixers = [_ATTENTION if number % period == offset else _MAMBA for number in range(n_layer)]
    settings.only("layers_block_type", [{_MAMBA: "mamba", _ATTENTION: "attention"}[name] for name in mixers])
    settings.only("hidden_act", "silu", "swish")
    settings.only("mamba_conv_bias", True)
    settings.only("mamba_proj_bias", False)
    settings.only("sliding_window", None)
    settings.ignore("max_position_embeddings", "layer_types", "num_logits_to_keep")
    settings.ignore("use_mamba_kernels", "use_mambapy", "use_associative_scan")
    epsilon = settings.number("rms_norm_eps", _NORM_EPSILON)
    options = {_MAMBA: _mamba_options(settings, d_model, epsilon), _ATTENTION: _attention_options(settings)}
    return hybrid_config(
        settings, mixers, options, d_model=d_model, norm_epsilon=epsilon, vocab_size=65536, d_channel_mixing=14336
    )


def _refuse_experts(settings: Settings, n_layer: int) -> None:
    period, offset = settings.size("expert_layer_period", 2), settings.size("expert_layer_offset", 1, least=0)
    n_experts = settings.size("num_experts", 16)
    settings.ignore("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")
    n_sparse = sum(number % period == offset for number in range(n_layer))
    if n_experts > 1 and n_sparse:
        got = f"{n_experts} in {n_sparse} of {n_layer} layers"
        raise ValueError(sentence("num_experts", got, "1", "mixtures of experts are not supported"))


def _mamba_options(settings: Settings, d_model: int, epsilon: float) -> dict[str, Any]:
    return {
        "d_state": settings.size("mamba_d_state", 16),
        "d_conv": settings.size("mamba_d_conv", 4),
        "expand": settings.size("mamba_expand", 2),
        "dt_rank": settings.optional_size("mamba_dt_rank", absent="auto") or math.ceil(d_model / 16),
        "selection_norm": epsilon,
        "selection_scales": True,
    }


def _attention_options(settings: Settings) -> dict[str, Any]:
    n_heads = settings.size("num_attention_heads", 32)
    return {
        "n_heads": n_heads,
        "n_kv_heads": settings.optional_size("num_key_value_heads", 8) or n_heads,
        "dropout": settings.number("attention_dropout", 0.0),
        **_WITHOUT_POSITIONS,
    }


def _rules(config: LanguageModelConfig) -> list[Rule]:
    own, theirs = r"blocks\.(\d+)", r"model.layers.\1"
    mixer = {**MIXER, **{f"{name}.weight": f"{other}.weight" for name, other in _NORMS.items()}}
    rules = [
        Rule(r"embedding\.weight", ("model.embed_tokens.weight",)),
        Rule(rf"{own}\.norm_mixing\.weight", (rf"{theirs}.input_layernorm.weight",)),
        Rule(rf"{own}\.norm_feed_forward\.weight", (rf"{theirs}.pre_ff_layernorm.weight",)),
        *plain_rules(rf"{own}\.feed_forward", rf"{theirs}.feed_forward", SWIGLU, ".weight"),
        Rule(r"norm\.weight", ("model.final_layernorm.weight",)),
        Rule(r"head\.weight", ("lm_head.weight",)),
    ]
    for number, (name, options) in enumerate(config.mixers):
        if name == _ATTENTION:
            rules += _attention(number, config.d_model, options)
        else:
            rules += plain_rules(rf"blocks\.{number}\.mixer", f"model.layers.{number}.mamba", mixer)
    return rules


def _attention(number: int, d_model: int, options: dict[str, Any]) -> list[Rule]:
    own, theirs = rf"blocks\.{number}\.mixer", f"model.layers.{number}.self_attn"
    n_heads, n_kv_heads = attention_heads(options)
    names, order = [f"{theirs}.{name}_proj.weight" for name in "qkv"], torch.arange(d_model // n_heads)
    return [
        qkv_rule(rf"{own}\.qkv\.weight", names, n_heads, n_kv_heads, order),
        Rule(rf"{own}\.output_projection\.weight", (f"{theirs}.o_proj.weight",)),
    ]


def _settings(config: LanguageModelConfig) -> dict[str, Any]:
    options = dict(config.mixers)
    mamba, attention = options[_MAMBA], options.get(_ATTENTION, _WITHOUT_POSITIONS)
    _require_published(config, mamba, attention)
    period, offset = _places_of_attention([name for name, _ in config.mixers])
    n_heads, n_kv_heads = attention_heads(attention)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": max(config.d_channel_mixing, 1),
        "num_hidden_layers": config.n_layer,
        "num_experts": 1,
        "attn_layer_period": period,
        "attn_layer_offset": offset,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "attention_dropout": attention.get("dropout", 0.0),
        "mamba_d_state": mamba.get("d_state", 16),
        "mamba_d_conv": mamba.get("d_conv", 4),
        "mamba_expand": mamba.get("expand", 2),
        "mamba_dt_rank": mamba.get("dt_rank") or "auto",
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _places_of_attention(mixers: list[str]) -> tuple[int, int]:
    """The period and the offset that put attention where it is."""
    attends = [name == _ATTENTION for name in mixers]
    for period in range(1, len(mixers) + 2):
        for offset in range(period):
            if attends == [number % period == offset for number in range(len(mixers))]:
                return period, offset
    raise ValueError(sentence("mixer", mixers, "attention at equal distances, as of a JambaForCausalLM"))


def _require_published(config: LanguageModelConfig, mamba: dict[str, Any], attention: dict[str, Any]) -> None:
    """Refuse options that transformers' class does not have."""
    what = f"as of a JambaForCausalLM with norm_epsilon {config.norm_epsilon}"
    asked = [
        ("selection_norm of mamba", mamba.get("selection_norm"), config.norm_epsilon),
        ("selection_scales of mamba", mamba.get("selection_scales", False), True),
        ("rotated_share of rotary-attention", attention.get("rotated_share", 1.0), 0.0),
        ("window of rotary-attention", attention.get("window", 128), None),
        ("output_bias of rotary-attention", attention.get("output_bias", False), False),
    ]
    for name, got, wanted in asked:
        require(got == wanted, name, got, f"{wanted}, {what}")
    d_head = attention.get("d_head")
    require(
        d_head in (None, config.d_model // attention_heads(attention)[0]),
        "d_head",
        d_head,
        f"d_model / n_heads, {what}",
    )


JAMBA = Architecture(
    "jamba", "JambaForCausalLM", _MAMBA, _config, _rules, _settings, lambda config: config.d_channel_mixing > 0
)
