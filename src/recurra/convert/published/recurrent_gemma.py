"""Griffin as transformers' RecurrentGemmaForCausalLM has it (google/recurrentgemma-2b, -9b)."""

from typing import Any

import torch

from recurra.checks import require
from recurra.convert.published._rules import (
    SWIGLU,
    Architecture,
    Rule,
    attention_heads,
    one_more,
    qkv_rule,
    take_rotation,
    turned_pairs,
)
from recurra.convert.published._settings import MOST_LAYERS, Settings
from recurra.models.language_model import LanguageModelConfig

_KINDS = {"recurrent": "rg-lru", "attention": "rotary-attention"}
_RECURRENT = {
    "gate": "linear_y",
    "input_projection": "linear_x",
    "convolution": "conv_1d",
    "output_projection": "linear_out",
}
_ROTATED_SHARE = 0.5
_CLASS = "RecurrentGemmaForCausalLM"


def _config(settings: Settings) -> LanguageModelConfig:
    d_model, n_layer = settings.size("hidden_size", 2560), settings.size("num_hidden_layers", 26, most=MOST_LAYERS)
    n_heads = settings.size("num_attention_heads", 10)
    own = settings.words("_block_types", _KINDS)  # its name in the published files
    kinds = settings.words("block_types", _KINDS) or own or ["recurrent", "recurrent", "attention"]
    hidden = settings.size("intermediate_size", 3 * 2560)
    theta, share = take_rotation(settings, _ROTATED_SHARE)
    require(theta == 10000.0, "rope_theta", theta, "10000.0, as rotary-attention has it")
    settings.only("hidden_activation", "gelu_pytorch_tanh")
    settings.only("attention_bias", False)
    settings.only("embeddings_scale_by_sqrt_dim", True)
    settings.only("head_dim", d_model // n_heads)
    settings.ignore("w_init_variance_scale", "final_w_init_variance_scale", "layer_types", "layers_block_type")
    options = {
        "recurrent": {
            "lru_width": settings.optional_size("lru_width") or d_model,
            "n_heads": n_heads,
            "d_conv": settings.size("conv1d_width", 4),
        },
        "attention": {
            "n_heads": n_heads,
            "n_kv_heads": settings.optional_size("num_key_value_heads") or n_heads,
            "rotated_share": share,
            "window": settings.size("attention_window_size", 2048),
            "output_bias": True,
            "dropout": settings.number("attention_dropout", 0.0),
        },
    }
    return LanguageModelConfig(
        vocab_size=settings.size("vocab_size", 256000),
        n_layer=n_layer,
        d_model=d_model,
        d_channel_mixing=hidden // 2,
        mixer=[_KINDS[kinds[number % len(kinds)]] for number in range(n_layer)],
        mixer_options={_KINDS[kind]: options[kind] for kind in kinds[:n_layer]},
        feed_forward="geglu-tanh",
        norm="rms",
        norm_epsilon=settings.number("rms_norm_eps", 1e-6),
        tie_embeddings=settings.flag("tie_word_embeddings", True),
        # transformers keeps the factor in bfloat16
        embedding_scale=float(torch.tensor(d_model**0.5, dtype=torch.bfloat16)),
        logit_cap=settings.number("logits_soft_cap", 30.0),
    )


def _rules(config: LanguageModelConfig) -> list[Rule]:
    rules = [
        Rule(r"embedding\.weight", ("model.embed_tokens.weight",)),
        one_more(r"blocks\.(\d+)\.norm_mixing\.weight", r"model.layers.\1.temporal_pre_norm.weight"),
        one_more(r"blocks\.(\d+)\.norm_feed_forward\.weight", r"model.layers.\1.channel_pre_norm.weight"),
        one_more(r"norm\.weight", "model.final_norm.weight"),
        Rule(r"head\.linear\.weight", ("lm_head.weight",)),
    ]
    for own, theirs in SWIGLU.items():
        rules.append(Rule(rf"blocks\.(\d+)\.feed_forward\.{own}\.(\w+)", (rf"model.layers.\1.mlp_block.{theirs}.\2",)))
    for number, (name, options) in enumerate(config.mixers):
        rules += (_recurrent if name == "rg-lru" else _attention)(number, config.d_model, options)
    return rules


def _recurrent(number: int, d_model: int, options: dict[str, Any]) -> list[Rule]:
    own, theirs = rf"blocks\.{number}\.mixer", f"model.layers.{number}.temporal_block"
    n_heads = _recurrent_heads(d_model, options)
    rules = [Rule(rf"{own}\.{name}\.(\w+)", (rf"{theirs}.{other}.\1",)) for name, other in _RECURRENT.items()]
    rules.append(Rule(rf"{own}\.decay", (f"{theirs}.rg_lru.recurrent_param",)))
    for name, other in (("recurrence_gate", "recurrent_gate"), ("input_gate", "input_gate")):
        rules.append(Rule(rf"{own}\.{name}\.weight", (f"{theirs}.rg_lru.{other}_weight",)))
        bias = (f"{theirs}.rg_lru.{other}_bias",)
        rules.append(Rule(rf"{own}\.{name}\.bias", bias, torch.flatten, lambda x: (x.unflatten(0, (n_heads, -1)),)))
    return rules


def _attention(number: int, d_model: int, options: dict[str, Any]) -> list[Rule]:
    own, theirs = rf"blocks\.{number}\.mixer", f"model.layers.{number}.temporal_block"
    n_heads, n_kv_heads = attention_heads(options)
    d_head = d_model // n_heads
    order = turned_pairs(d_head, int(d_head * options.get("rotated_share", 1.0)))
    names = [f"{theirs}.{name}_proj.weight" for name in "qkv"]
    return [
        qkv_rule(rf"{own}\.qkv\.weight", names, n_heads, n_kv_heads, order),
        Rule(rf"{own}\.output_projection\.(\w+)", (rf"{theirs}.o_proj.\1",)),
    ]


def _settings(config: LanguageModelConfig) -> dict[str, Any]:
    names = {name: kind for kind, name in _KINDS.items()}
    options = dict(config.mixers)
    recurrent, attention = options["rg-lru"], options.get("rotary-attention")
    n_heads = _recurrent_heads(config.d_model, recurrent)
    if attention is None:
        attention = {"n_heads": n_heads, "rotated_share": _ROTATED_SHARE, "window": 2048, "output_bias": True}
    _require_published(config, attention, n_heads)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layer,
        "intermediate_size": 2 * config.d_channel_mixing,
        "num_attention_heads": n_heads,
        "num_key_value_heads": attention_heads(attention)[1],
        "block_types": [names.get(name, name) for name, _ in config.mixers],
        "lru_width": recurrent.get("lru_width") or config.d_model,
        "conv1d_width": recurrent.get("d_conv", 4),
        "attention_window_size": attention.get("window", 128),
        "attention_dropout": attention.get("dropout", 0.0),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": attention.get("rotated_share", 1.0),
        },
        "rms_norm_eps": config.norm_epsilon,
        "logits_soft_cap": config.logit_cap or 0.0,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _recurrent_heads(d_model: int, options: dict[str, Any]) -> int:
    """Heads of rg-lru, by its own default."""
    return options.get("n_heads") or max(1, (options.get("lru_width") or d_model) // 256)


def _require_published(config: LanguageModelConfig, attention: dict[str, Any], n_heads: int) -> None:
    """Refuse options that transformers' class does not have."""
    d_head = config.d_model // n_heads
    wanted = {"n_heads": n_heads, "rotation_base": 10000.0, "output_bias": True, "d_head": d_head}
    got = {"n_heads": 4, "rotation_base": 10000.0, "output_bias": False, **attention}
    got["d_head"] = attention.get("d_head") or d_head
    for name, value in wanted.items():
        require(got[name] == value, f"{name} of rotary-attention", got[name], f"{value}, as of a {_CLASS}")
    window = attention.get("window", 128)
    require(window is not None, "window of rotary-attention", window, f"a number of steps, as of a {_CLASS}")


RECURRENT_GEMMA = Architecture("recurrent_gemma", _CLASS, "rg-lru", _config, _rules, _settings)
