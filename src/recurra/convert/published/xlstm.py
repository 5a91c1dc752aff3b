"""xLSTM as transformers' xLSTMForCausalLM has it (NX-AI/xLSTM-7b): stacks of mLSTM layers."""

import math
from typing import Any

from recurra.checks import require
from recurra.convert.published._rules import Architecture, Rule, plain_rules, stacked
from recurra.convert.published._settings import MOST_LAYERS, Settings
from recurra.models.language_model import LanguageModelConfig

_HOW_IT_RUNS_NAMES = """
add_forward_backend_padding autocast_kernel_dtype chunk_size chunkwise_kernel force_bos_token_insert head_dim
igate_bias_init_range inference_state_dtype max_inference_chunksize mlstm_round_up_to_multiple_of mode
norm_reduction_force_float32 return_last_states sequence_kernel step_kernel
"""
_HOW_IT_RUNS = frozenset(_HOW_IT_RUNS_NAMES.split())

_FEED_FORWARD = {"gate": "proj_up_gate", "up": "proj_up", "down": "proj_down"}
_FIXED = {
    **dict.fromkeys(("use_bias", "add_embedding_dropout", "add_post_norm", "add_qk_norm"), False),
    **dict.fromkeys(("add_out_norm", "add_post_blocks_norm"), True),
    **dict.fromkeys(("norm_eps", "eps", "cell_norm_eps"), 1e-6),
    "gate_soft_cap": 15.0,
    "weight_mode": "single",
}


def _config(settings: Settings) -> LanguageModelConfig:
    width, depth = map(settings.optional_size, ("embedding_dim", "num_blocks"))  # their names in the published file
    d_model = settings.size("hidden_size", width or 4096)
    n_layer = settings.size("num_hidden_layers", depth or 32, most=MOST_LAYERS)
    require(width in (None, d_model), "embedding_dim", width, f"that of hidden_size, {d_model}")
    require(depth in (None, n_layer), "num_blocks", depth, f"that of num_hidden_layers, {n_layer}")
    multiple = settings.size("ffn_round_up_to_multiple_of", 64)
    hidden = _channels(settings, "ffn_proj_factor", 2.667, d_model)
    for name, value in _FIXED.items():
        settings.only(name, value)
    settings.ignore(*_HOW_IT_RUNS)
    return LanguageModelConfig(
        vocab_size=settings.size("vocab_size", 50304),
        n_layer=n_layer,
        d_model=d_model,
        d_channel_mixing=int((hidden + multiple - 1) // multiple * multiple),
        mixer="mlstm",
        mixer_options={
            "d_qk": int(_channels(settings, "qk_dim_factor", 0.5, d_model)),
            "d_v": int(_channels(settings, "v_dim_factor", 1.0, d_model)),
            "n_heads": settings.size("num_heads", 8),
        },
        feed_forward="swiglu",
        norm="rms",
        norm_epsilon=1e-6,
        biases=False,
        tie_embeddings=settings.flag("tie_word_embeddings", False),
        logit_cap=settings.number("output_logit_soft_cap", 30.0),
    )


def _channels(settings: Settings, key: str, default: float, d_model: int) -> float:
    """Take a factor of d_model; return the product."""
    channels = d_model * settings.number(key, default)
    require(math.isfinite(channels), f"{key} * hidden_size", channels, "a number of channels")
    return channels


def _rules(config: LanguageModelConfig) -> list[Rule]:
    d_qk, d_v, n_heads = _sizes(config)
    own, theirs = r"blocks\.(\d+)", r"backbone.blocks.\1"
    names = (rf"{theirs}.mlstm_layer.{name}.weight" for name in ("q", "k", "v", "ogate_preact"))
    gates = [rf"{theirs}.mlstm_layer.{name}_preact.\2" for name in ("igate", "fgate")]
    return [
        Rule(r"embedding\.weight", ("backbone.embeddings.weight",)),
        Rule(rf"{own}\.norm_mixing\.weight", (rf"{theirs}.norm_mlstm.weight",)),
        Rule(rf"{own}\.norm_feed_forward\.weight", (rf"{theirs}.norm_ffn.weight",)),
        stacked(rf"{own}\.mixer\.qkvo\.weight", list(names), [d_qk, d_qk, d_v, d_v]),
        stacked(rf"{own}\.mixer\.gates\.(\w+)", gates, [n_heads, n_heads]),
        Rule(rf"{own}\.mixer\.norm_weight", (rf"{theirs}.mlstm_layer.multihead_norm.weight",)),
        Rule(rf"{own}\.mixer\.output_projection\.weight", (rf"{theirs}.mlstm_layer.out_proj.weight",)),
        *plain_rules(rf"{own}\.feed_forward", rf"{theirs}.ffn", _FEED_FORWARD, ".weight"),
        Rule(r"norm\.weight", ("backbone.out_norm.weight",)),
        Rule(r"head\.linear\.weight", ("lm_head.weight",)),
    ]


def _settings(config: LanguageModelConfig) -> dict[str, Any]:
    d_qk, d_v, n_heads = _sizes(config)
    require(config.logit_cap is not None, "logit_cap", None, "a number, as of an xLSTMForCausalLM")
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layer,
        "num_heads": n_heads,
        "qk_dim_factor": _factor(d_qk, config.d_model),
        "v_dim_factor": _factor(d_v, config.d_model),
        "ffn_proj_factor": config.d_channel_mixing / config.d_model,
        "ffn_round_up_to_multiple_of": max(config.d_channel_mixing, 1),
        "output_logit_soft_cap": config.logit_cap,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _sizes(config: LanguageModelConfig) -> tuple[int, int, int]:
    options, d_model = config.mixer_options, config.d_model
    return options.get("d_qk") or d_model // 2, options.get("d_v") or d_model, options.get("n_heads", 8)


def _factor(channels: int, d_model: int) -> float:
    """The factor that makes `channels` of d_model, rounded down as transformers does."""
    factor = channels / d_model
    return factor if int(d_model * factor) == channels else math.nextafter(factor, math.inf)


XLSTM = Architecture("xlstm", "xLSTMForCausalLM", "mlstm", _config, _rules, _settings)
