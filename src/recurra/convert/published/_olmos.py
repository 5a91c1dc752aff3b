"""Gated DeltaNets and attention with norms after its layers: transformers' OlmoHybridForCausalLM."""

from typing import Any

import torch
from torch import Tensor

from recurra.checks import require
from recurra.convert.published._qwens import DELTA, entries_of_delta, sizes_of_delta
from recurra.convert.published._rules import (
    SWIGLU,
    Architecture,
    Block,
    Rule,
    attention_rules,
    head_norm_rules,
    heads_of,
    kinds_of,
    plain_rules,
    shape_of,
    stacked,
)
from recurra.convert.published._settings import Settings
from recurra.models.language_model import LanguageModelConfig

_Options = dict[str, dict[str, Any]]

# --- OLMo Hybrid (allenai/Olmo-Hybrid-7B) ---

_LINEAR, _ATTENTION = "gated-delta-net", "rotary-attention"
_OF_OLMO = {"linear_attention": _LINEAR, "full_attention": _ATTENTION}
_PARTS = DELTA | {"gate_projection": "g_proj", "rate_projection": "b_proj", "decay_projection": "a_proj"}
_PARTS |= {"norm": "o_norm", "output_projection": "o_proj"}
_NORMS = {
    _LINEAR: {"norm_mixing": "input_layernorm", "norm_feed_forward": "post_attention_layernorm"},
    _ATTENTION: {"norm_mixing": "post_attention_layernorm", "norm_feed_forward": "post_feedforward_layernorm"},
}
_OF_NEW_WEIGHTS = "linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min"


def _olmo_config(settings: Settings, d_model: int, n_layer: int) -> dict[str, Any]:
    kinds = settings.words("layer_types", _OF_OLMO)
    if kinds is None:
        kinds = [list(_OF_OLMO)[number % 4 == 3] for number in range(n_layer)]
        kinds = kinds if n_layer > 3 else [*kinds[:-1], "full_attention"]
    require(len(kinds) == n_layer, "layer_types", kinds, f"one of {', '.join(_OF_OLMO)} for each of {n_layer} layers")
    settings.only(hidden_act=("silu", "swish"), attention_bias=False)
    settings.ignore(f"max_position_embeddings {_OF_NEW_WEIGHTS}")
    rotates, (base, share) = settings.rotates(), settings.rotation(1.0)
    require(share == 1, "partial_rotary_factor", share, "1.0, as transformers' class turns all channels")
    epsilon, n_heads = settings.number("rms_norm_eps", 1e-6), settings.size("num_attention_heads", 30)
    n_qk_heads, n_value_heads = (settings.optional_size(f"linear_num_{x}_heads") or n_heads for x in ("key", "value"))
    d_key = settings.optional_size("linear_key_head_dim") or int(0.75 * d_model / n_qk_heads)
    options: _Options = {
        _LINEAR: {
            "n_heads": n_value_heads,
            "n_qk_heads": n_qk_heads,
            "d_qk": n_qk_heads * d_key,
            "d_v": n_value_heads * (settings.optional_size("linear_value_head_dim") or 2 * d_key),
            "kernel_size": settings.size("linear_conv_kernel_dim", 4),
            "negative_eigenvalues": settings.flag("linear_allow_neg_eigval", True),
        },
        _ATTENTION: {
            "n_heads": n_heads,
            "n_kv_heads": settings.optional_size("num_key_value_heads") or n_heads,
            "d_head": d_model // n_heads,
            "rotated_share": float(rotates),
            "rotation_base": base,
            "window": None,
            "dropout": settings.number("attention_dropout", 0.0),
            "qk_norm": epsilon,
            "qk_norm_over": "all",
        },
    }
    shape = shape_of([_OF_OLMO[kind] for kind in kinds], options, settings.size("intermediate_size", 11008), epsilon)
    return shape | {"norm_place": ["after" if kind == "full_attention" else "before" for kind in kinds]}


def _olmo_rules(block: Block) -> list[Rule]:
    layer = f"model.layers.{block.number}."
    norms = plain_rules(_NORMS[block.mixer], f"blocks.{block.number}.", layer)
    if block.mixer == _ATTENTION:
        theirs = f"{layer}self_attn."
        heads = head_norm_rules(block, {"query_norm": "q_norm", "key_norm": "k_norm"}, theirs)
        return [*norms, *attention_rules(block, theirs), *heads]
    theirs, sizes = f"{layer}linear_attn.", sizes_of_delta(block.d_model, block.options)
    rows = [sizes["d_qk"], sizes["d_qk"], sizes["d_v"]]
    qkv = stacked(f"{block.own}qkv.weight", [f"{theirs}{part}_proj.weight" for part in "qkv"], rows)
    return [*norms, qkv, *plain_rules(_PARTS, block.own, theirs)]


def _usual(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """As published, a layer's convolution is three tensors, and two norms have other names than in the class.

    Transformers cuts it into three equal parts when it saves a model, whatever the sizes of q, k and v.
    """
    for old, new in (
        ("attention_layer_norm", "input_layernorm"),
        ("feedforward_layer_norm", "post_attention_layernorm"),
    ):
        weights = {name.replace(f".{old}.", f".{new}."): tensor for name, tensor in weights.items()}
    for name in [name for name in weights if name.endswith(".q_conv1d.weight")]:
        parts = [name.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        if all(part in weights for part in parts):
            weights[name.replace("q_conv1d", "conv1d")] = torch.cat([weights.pop(part) for part in parts])
    return weights


def _olmo_settings(config: LanguageModelConfig, options: _Options) -> dict[str, Any]:
    linear, attention = options[_LINEAR], options[_ATTENTION]
    n_heads, n_kv_heads, _ = heads_of(Block(0, _ATTENTION, attention, config.d_model))
    base = attention["rotation_base"] if attention["rotated_share"] else None
    return {
        "intermediate_size": max(config.d_channel_mixing, 1),
        "layer_types": kinds_of(config, _OF_OLMO),
        **entries_of_delta(config.d_model, linear),
        "linear_allow_neg_eigval": linear["negative_eigenvalues"],
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "attention_dropout": attention["dropout"],
        "rope_parameters": {"rope_type": "default", "rope_theta": base},
        "rms_norm_eps": config.norm_epsilon,
        "pad_token_id": None,  # by default one that a small vocabulary does not have, which the class refuses
    }


OLMO_HYBRID = Architecture(
    model_type="olmo_hybrid",
    mixer=_LINEAR,
    names={
        "embedding": "model.embed_tokens",
        **{f"blocks.#.feed_forward.{own}": f"model.layers.#.mlp.{name}" for own, name in SWIGLU.items()},
        "norm": "model.norm",
        "head": "lm_head",
    },
    config=_olmo_config,
    settings=_olmo_settings,
    rules=_olmo_rules,
    fits=lambda config: _ATTENTION in dict(config.mixers),
    other_layout=_usual,
)
