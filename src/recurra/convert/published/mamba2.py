"""Mamba-2 as transformers' Mamba2ForCausalLM has it (mistralai/Mamba-Codestral-7B, state-spaces/mamba2-* converted)."""

import math
from typing import Any

from recurra.checks import require
from recurra.convert.published.architecture import Architecture, register_architecture
from recurra.convert.published.mamba import common_rules, take_common
from recurra.convert.published.rules import Rule
from recurra.convert.published.settings import Settings
from recurra.models import LanguageModelConfig

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


def _config(settings: Settings) -> LanguageModelConfig:
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
        n_layer=take_common(settings, d_model),
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


def _rules(config: LanguageModelConfig) -> list[Rule]:
    return common_rules(_MIXER)


def _settings(config: LanguageModelConfig) -> dict[str, Any]:
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


register_architecture(Architecture("mamba2", "Mamba2ForCausalLM", "mamba2", _config, _rules, _settings))
