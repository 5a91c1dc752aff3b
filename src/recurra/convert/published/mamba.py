"""Mamba as transformers' MambaForCausalLM (state-spaces/mamba-*-hf) and FalconMambaForCausalLM have it."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from recurra.checks import require, sentence
from recurra.convert.published._rules import Architecture, Rule, plain_rules
from recurra.convert.published._settings import MOST_LAYERS, Settings
from recurra.models.language_model import LanguageModelConfig

MIXER = {
    "input_projection.weight": "in_proj.weight",
    "convolution.weight": "conv1d.weight",
    "convolution.bias": "conv1d.bias",
    "selection.weight": "x_proj.weight",
    "step_projection.weight": "dt_proj.weight",
    "step_bias": "dt_proj.bias",
    "log_decay": "A_log",
    "skip": "D",
    "output_projection.weight": "out_proj.weight",
}
"""The weights of a Mamba: names here to names there."""


def _take_common(settings: Settings, d_model: int) -> int:
    """Take what both Mambas have; return the number of blocks."""
    settings.only("use_bias", False)
    settings.only("use_conv_bias", True)
    settings.only("hidden_act", "silu", "swish")
    settings.only("rms_norm", True)
    settings.only("ssm_cfg", {})
    settings.only("d_model", d_model)
    n_layer = settings.size("num_hidden_layers", most=MOST_LAYERS)
    settings.only("n_layer", n_layer)
    settings.ignore("residual_in_fp32", "rescale_prenorm_residual", "use_mambapy", "use_associative_scan")
    settings.ignore("fused_add_norm", "pad_vocab_size_multiple", "layer_types")
    settings.ignore(*(f"time_step_{name}" for name in ("scale", "min", "max", "init_scheme", "floor")))
    return n_layer


def _common_rules(mixer: Mapping[str, str]) -> list[Rule]:
    """Make the rules of both Mambas, around those of the mixer's weights: names here to names there."""
    layer = r"backbone.layers.\1"
    return [
        Rule(r"embedding\.weight", ("backbone.embeddings.weight",)),
        Rule(r"blocks\.(\d+)\.norm_mixing\.weight", (rf"{layer}.norm.weight",)),
        *plain_rules(r"blocks\.(\d+)\.mixer", rf"{layer}.mixer", mixer),
        Rule(r"norm\.weight", ("backbone.norm_f.weight",)),
        Rule(r"head\.weight", ("lm_head.weight",)),
    ]


def _config(settings: Settings) -> LanguageModelConfig:
    d_model = settings.size("hidden_size")
    inner = settings.size("intermediate_size", settings.size("expand", 2) * d_model)
    if inner % d_model:
        raise ValueError(sentence("intermediate_size", inner, f"a multiple of hidden_size = {d_model}"))
    settings.only("d_inner", inner)
    return LanguageModelConfig(
        vocab_size=settings.size("vocab_size", 50280),
        n_layer=_take_common(settings, d_model),
        d_model=d_model,
        d_channel_mixing=0,
        mixer="mamba",
        mixer_options={
            "d_state": settings.size("state_size", 16),
            "d_conv": settings.size("conv_kernel", 4),
            "expand": inner // d_model,
            "dt_rank": settings.optional_size("time_step_rank", absent="auto") or math.ceil(d_model / 16),
        },
        norm="rms",
        norm_epsilon=settings.number("layer_norm_epsilon", 1e-5),
        biases=False,
        tie_embeddings=settings.flag("tie_word_embeddings", True),
    )


def _settings(config: LanguageModelConfig) -> dict[str, Any]:
    options = config.mixer_options
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layer,
        "state_size": options.get("d_state", 16),
        "conv_kernel": options.get("d_conv", 4),
        "expand": options.get("expand", 2),
        "time_step_rank": options.get("dt_rank") or "auto",
        "layer_norm_epsilon": config.norm_epsilon,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _falcon_config(settings: Settings) -> LanguageModelConfig:
    epsilon = settings.number("mixer_rms_eps", 1e-6)
    settings.ignore("use_falcon_mambapy")
    config = _config(settings)
    return replace(config, mixer_options={**config.mixer_options, "selection_norm": epsilon})


def _falcon_settings(config: LanguageModelConfig) -> dict[str, Any]:
    return {**_settings(config), "mixer_rms_eps": config.mixer_options["selection_norm"]}


def _is_falcon(config: LanguageModelConfig) -> bool:
    options = config.mixer_options
    is_falcon = not config.d_channel_mixing and options.get("selection_norm") is not None
    if is_falcon and options.get("selection_scales", False):
        raise ValueError(sentence("selection_scales of mamba", "True", "False, as of a FalconMambaForCausalLM"))
    return is_falcon


def _is_mamba(config: LanguageModelConfig) -> bool:
    """Whether no block has a feed-forward network, as Jamba's have, and no selection is normalised."""
    return not config.d_channel_mixing and not _is_falcon(config)


MAMBA = Architecture(
    "mamba", "MambaForCausalLM", "mamba", _config, lambda config: _common_rules(MIXER), _settings, _is_mamba
)
FALCON_MAMBA = MAMBA._replace(
    model_type="falcon_mamba",
    class_name="FalconMambaForCausalLM",
    config=_falcon_config,
    settings=_falcon_settings,
    fits=_is_falcon,
)


# --- Mamba-2 as transformers' Mamba2ForCausalLM has it (mistralai/Mamba-Codestral-7B, state-spaces/mamba2-*) ---


_MIXER = {
    "input_projection.weight": "in_proj.weight",
    "convolution.weight": "conv1d.weight",
    "convolution.bias": "conv1d.bias",
    "step_bias": "dt_bias",
    "log_decay": "A_log",
    "skip": "D",
    "norm.weight": "norm.weight",
    "output_projection.weight": "out_proj.weight",
}


def _mamba2_config(settings: Settings) -> LanguageModelConfig:
    d_model, expand = settings.size("hidden_size", 4096), settings.size("expand", 2)
    n_heads = settings.size("num_heads", 128)
    d_head = settings.size("head_dim", 64)
    wanted = f"expand * hidden_size = {expand * d_model}"
    require(n_heads * d_head == expand * d_model, "num_heads * head_dim", n_heads * d_head, wanted)
    # transformers writes infinity as an object, since JSON has none; others write it as Infinity
    settings.only("time_step_limit", [0.0, math.inf], [0.0, {"__float__": "Infinity"}])
    settings.ignore("norm_before_gate")  # true in published files; transformers' class always gates first
    settings.only("rms_norm", True)
    settings.only("layer_norm_epsilon", 1e-5)
    settings.ignore("chunk_size", "time_step_rank", "intermediate_size")
    return LanguageModelConfig(
        vocab_size=settings.size("vocab_size", 32768),
        n_layer=_take_common(settings, d_model),
        d_model=d_model,
        d_channel_mixing=0,
        mixer="mamba2",
        mixer_options={
            "d_state": settings.size("state_size", 128),
            "d_conv": settings.size("conv_kernel", 4),
            "expand": expand,
            "n_heads": n_heads,
            "n_groups": settings.size("n_groups", 8),
        },
        norm="rms",
        biases=False,
        tie_embeddings=settings.flag("tie_word_embeddings", False),
    )


def _mamba2_settings(config: LanguageModelConfig) -> dict[str, Any]:
    options = config.mixer_options
    inner = options.get("expand", 2) * config.d_model
    n_heads = options.get("n_heads") or max(inner // 64, 1)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layer,
        "state_size": options.get("d_state", 128),
        "conv_kernel": options.get("d_conv", 4),
        "expand": options.get("expand", 2),
        "num_heads": n_heads,
        "head_dim": inner // n_heads,
        "n_groups": options.get("n_groups", 1),
        "tie_word_embeddings": config.tie_embeddings,
    }


MAMBA2 = Architecture(
    "mamba2", "Mamba2ForCausalLM", "mamba2", _mamba2_config, lambda config: _common_rules(_MIXER), _mamba2_settings
)
