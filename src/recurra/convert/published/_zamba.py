"""Mamba-2, and attention shared between layers: transformers' Zamba2ForCausalLM."""

from typing import Any

import torch

from recurra.checks import require
from recurra.convert.published._mambas import PARTS_OF_MAMBA2, heads_of_mamba2
from recurra.convert.published._rules import (
    Architecture,
    Block,
    Rule,
    attention_rules,
    kinds_of,
    plain_rules,
    reordered,
    turned_pairs,
)
from recurra.convert.published._settings import Settings, written
from recurra.models.language_model import LanguageModelConfig

_Options = dict[str, dict[str, Any]]

# --- Zamba2 (Zyphra/Zamba2-1.2B, -2.7B, -7B) ---

_LINEAR, _HYBRID = "mamba2", "zamba2"
_OF_ZAMBA = {"linear_attention": _LINEAR, "hybrid": _HYBRID, "mamba": _LINEAR}
_SIZES = {"d_state": ("mamba_d_state", 64), "d_conv": ("mamba_d_conv", 4), "n_groups": ("mamba_ngroups", 1)}
_SIZES_OF_HYBRIDS = {"n_heads": ("num_attention_heads", 32), "rank": ("adapter_rank", 128)}
_SIZES_OF_HYBRIDS |= {"n_shared": ("num_mem_blocks", 1)}
_OWN = {"projection": "linear", "norm_mamba": "mamba_decoder.input_layernorm"}
_SHARED = {
    "norm_attention": "input_layernorm",
    "norm_feed_forward": "pre_ff_layernorm",
    "gate_up.linear": "feed_forward.gate_up_proj",
    "down": "feed_forward.down_proj",
}
_HOW_IT_RUNS = """
chunk_size max_position_embeddings num_logits_to_keep time_step_floor time_step_max use_conv_bias use_mamba_kernels
use_mem_eff_path
"""


def _zamba_config(settings: Settings, d_model: int, n_layer: int) -> dict[str, Any]:
    settings.only(add_bias_linear=False, hidden_act="gelu", use_long_context=False)
    settings.ignore(_HOW_IT_RUNS)
    usual = ["hybrid" if number in (6, 12, 18, 24, 30, 36, 42, 47, 51) else "mamba" for number in range(n_layer)]
    kinds = settings.layers("layers_block_type", _OF_ZAMBA, usual)
    sizes, own = settings.sizes(_SIZES), settings.sizes(_SIZES_OF_HYBRIDS)
    epsilon, least_step = settings.number("rms_norm_eps", 1e-5), settings.positive("time_step_min", 0.001)
    inner, mamba_heads = settings.size("mamba_expand", 2) * d_model, settings.size("n_mamba_heads", 8)
    n_heads, n_kv_heads = own["n_heads"], settings.optional_size("num_key_value_heads") or own["n_heads"]
    adapts = settings.flag("use_shared_attention_adapter", False)
    require(n_kv_heads == n_heads or not adapts, "num_key_value_heads", n_kv_heads, f"{n_heads} with adapters")
    settings.only(attention_head_dim=2 * d_model // n_heads, attention_hidden_size=2 * d_model)
    settings.only(kv_channels=d_model // n_heads, num_query_groups=n_heads, mamba_headdim=inner // mamba_heads)
    settings.only(hybrid_layer_ids=[number for number, kind in enumerate(kinds) if kind == "hybrid"])
    base, rotates = settings.whole_rotation(), settings.flag("use_mem_rope", False)
    mamba = {**sizes, "d_inner": inner, "least_step": least_step}
    options: _Options = {
        _LINEAR: mamba | {"n_heads": mamba_heads},
        _HYBRID: {
            **mamba,
            **own,
            "n_mamba_heads": mamba_heads,
            "n_kv_heads": n_kv_heads,
            "rotated_share": float(rotates),
            "rotation_base": base,
            "window": None,
            "dropout": settings.number("attention_dropout", 0.0),
            "d_hidden": settings.optional_size("intermediate_size") or 4 * d_model,
            "adapts_attention": adapts,
            "norm_epsilon": epsilon,
        },
    }
    mixers = [_OF_ZAMBA[kind] for kind in kinds]
    return {
        "mixer": mixers,
        "mixer_options": {name: options[name] for name in dict.fromkeys(mixers)},
        "norm_epsilon": epsilon,
    }


def _zamba_rules(block: Block) -> list[Rule]:
    layer = f"model.layers.{block.number}."
    if block.mixer == _LINEAR:
        norm = plain_rules({"norm_mixing": "input_layernorm"}, f"blocks.{block.number}.", layer)
        return [*norm, *plain_rules(PARTS_OF_MAMBA2, block.own, f"{layer}mamba.")]
    turn = block.turns.index(block.number)
    theirs = f"model.layers.{block.turns[turn % block.options['n_shared']]}.shared_transformer."
    own = block.own
    return [
        *plain_rules(PARTS_OF_MAMBA2, f"{own}mamba.", f"{layer}mamba_decoder.mamba."),
        *plain_rules(_OWN, own, layer),
        *plain_rules(_SHARED, own, theirs),
        *_adapter_rules(f"{own}gate_up.adapters.0", f"{theirs}feed_forward.gate_up_proj_adapter_list.{turn}"),
        *_attention_rules(block, f"{theirs}self_attn.", turn),
    ]


def _attention_rules(block: Block, theirs: str, turn: int) -> list[Rule]:
    d_head = 2 * block.d_model // block.options["n_heads"]
    attention = block._replace(part="attention.", options=block.options | {"d_head": d_head})
    qkv, *output = attention_rules(attention, theirs, own="qkv.linear")
    adapters = [
        rule
        for number, name in enumerate("qkv")
        for rule in _adapter_rules(
            f"{attention.own}qkv.adapters.{number}",
            f"{theirs}linear_{name}_adapter_list.{turn}",
            None if name == "v" else turned_pairs(attention),
        )
    ]
    return [qkv, *output, *adapters]


def _adapter_rules(own: str, theirs: str, order: torch.Tensor | None = None) -> list[Rule]:
    order = torch.arange(1) if order is None else order
    back = torch.argsort(order)
    places = (f"{own}.", f"{theirs}.")
    second = plain_rules({"1": "1"}, *places, lambda x: reordered(x, order), lambda x: (reordered(x, back),))
    return [*plain_rules({"0": "0"}, *places), *second]


def _zamba_settings(config: LanguageModelConfig, options: _Options) -> dict[str, Any]:
    hybrid = options[_HYBRID]
    mamba = {**hybrid, "expand": 2, "n_heads": hybrid["n_mamba_heads"]}
    inner = hybrid["d_inner"] or 2 * config.d_model
    return {
        **written(hybrid, _SIZES | _SIZES_OF_HYBRIDS),
        "layers_block_type": [kind if kind == "hybrid" else "linear_attention" for kind in kinds_of(config, _OF_ZAMBA)],
        "mamba_expand": max(inner // config.d_model, 1),
        "n_mamba_heads": heads_of_mamba2(config, mamba),
        "time_step_min": hybrid["least_step"],
        "intermediate_size": hybrid["d_hidden"] or 4 * config.d_model,
        "num_key_value_heads": hybrid["n_kv_heads"] or hybrid["n_heads"],
        "use_shared_attention_adapter": hybrid["adapts_attention"],
        "use_mem_rope": hybrid["rotated_share"] > 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": hybrid["rotation_base"]},
        "attention_dropout": hybrid["dropout"],
        "rms_norm_eps": config.norm_epsilon,
    }


ZAMBA2 = Architecture(
    model_type="zamba2",
    mixer=_HYBRID,
    names={"embedding": "model.embed_tokens", "norm": "model.final_layernorm", "head": "lm_head"},
    config=_zamba_config,
    settings=_zamba_settings,
    rules=_zamba_rules,
    fits=lambda config: config.tie_embeddings,  # without tying, the class shares no weights
    tied=True,
    other_names={"layer_types": "layers_block_type"},
)
