"""RWKV-4 as transformers' RwkvForCausalLM has it (RWKV/rwkv-4-*-pile), xLSTM as xLSTMForCausalLM (NX-AI/xLSTM-7b)."""

import math
from typing import Any

import torch

from recurra.checks import require
from recurra.convert.published._rules import Architecture, Block, Rule, plain_rules, stacked
from recurra.convert.published._settings import Settings
from recurra.models.language_model import LanguageModelConfig

_Options = dict[str, dict[str, Any]]

# --- RWKV-4: a block there is two blocks here ---

_TIME, _CHANNELS = "rwkv4", "rwkv4-channel-mixing"
_HALVES = ("attention", "feed_forward")
_WEIGHTS = {
    "log_decay": "time_decay",
    "bonus": "time_first",
    "key": "key",
    "value": "value",
    "receptance": "receptance",
    "output_projection": "output",
}
_SHARES = {f"mix_{name}": f"time_mix_{name}" for name in ("key", "value", "receptance")}


def _rwkv_config(settings: Settings, d_model: int, n_layer: int) -> dict[str, Any]:
    settings.only(layer_norm_epsilon=1e-5)  # their last norm has this epsilon whatever the entry says
    # In evaluation transformers halves the residual stream every few blocks, to stay within float16, and the weights of
    # what is added to it. But for the norms' epsilon nothing changes, and in training it does not do so.
    settings.ignore("rescale_every context_length max_position_embeddings")
    return {
        "n_layer": 2 * n_layer,
        "mixer": [_TIME, _CHANNELS] * n_layer,
        "mixer_options": {
            _TIME: {"d_wkv": settings.optional_size("attention_hidden_size") or d_model},
            _CHANNELS: {"d_hidden": settings.optional_size("intermediate_size") or 4 * d_model},
        },
        "norm": "layer",
        "embedding_norm": True,
    }


def _rwkv_rules(block: Block) -> list[Rule]:
    layer, half = divmod(block.number, 2)
    theirs = f"rwkv.blocks.{layer}."
    mixer = f"{theirs}{_HALVES[half]}."
    return [
        *plain_rules({f"blocks.{block.number}.norm_mixing": f"{theirs}ln{half + 1}"}),
        *plain_rules(_WEIGHTS, block.own, mixer),
        # with dimensions of one batch and one step there
        *plain_rules(_SHARES, block.own, mixer, torch.flatten, lambda share: (share.view(1, 1, -1),)),
    ]


def _rwkv_settings(config: LanguageModelConfig, options: _Options) -> dict[str, Any]:
    channels = options.get(_CHANNELS, {"d_hidden": None})
    return {
        "num_hidden_layers": max(config.n_layer // 2, 1),
        "attention_hidden_size": options[_TIME]["d_wkv"] or config.d_model,
        "intermediate_size": channels["d_hidden"] or 4 * config.d_model,
        "rescale_every": 0,
    }


RWKV = Architecture(
    model_type="rwkv",
    mixer=_TIME,
    names={
        "embedding": "rwkv.embeddings",
        "embedding_norm": "rwkv.blocks.0.pre_ln",
        "norm": "rwkv.ln_out",
        "head": "head",
    },
    config=_rwkv_config,
    settings=_rwkv_settings,
    rules=_rwkv_rules,
    head="head.weight",
)


# --- xLSTM: a stack of mLSTM layers ---

_HOW_IT_RUNS = """
add_forward_backend_padding autocast_kernel_dtype chunk_size chunkwise_kernel force_bos_token_insert head_dim
igate_bias_init_range inference_state_dtype max_inference_chunksize mlstm_round_up_to_multiple_of mode
norm_reduction_force_float32 return_last_states sequence_kernel step_kernel
"""


def _xlstm_config(settings: Settings, d_model: int, n_layer: int) -> dict[str, Any]:
    multiple = settings.size("ffn_round_up_to_multiple_of", 64)
    hidden = settings.channels("ffn_proj_factor", 2.667, d_model)
    settings.only(use_bias=False, add_embedding_dropout=False, add_post_norm=False, add_qk_norm=False)
    settings.only(add_out_norm=True, add_post_blocks_norm=True, norm_eps=1e-6, eps=1e-6, cell_norm_eps=1e-6)
    settings.only(gate_soft_cap=15.0, weight_mode="single")
    settings.ignore(_HOW_IT_RUNS)
    return {
        "d_channel_mixing": int((hidden + multiple - 1) // multiple * multiple),
        "mixer_options": {
            "d_qk": int(settings.channels("qk_dim_factor", 0.5, d_model)),
            "d_v": int(settings.channels("v_dim_factor", 1.0, d_model)),
            "n_heads": settings.size("num_heads", 8),
        },
        "feed_forward": "swiglu",
        "norm_epsilon": 1e-6,
        "logit_cap": settings.number("output_logit_soft_cap", 30.0),
    }


def _xlstm_rules(block: Block) -> list[Rule]:
    (d_qk, d_v), n_heads = _channels(block.d_model, block.options), block.options["n_heads"]
    theirs = f"backbone.blocks.{block.number}.mlstm_layer."
    stacks = {
        "qkvo.weight": (["q.weight", "k.weight", "v.weight", "ogate_preact.weight"], [d_qk, d_qk, d_v, d_v]),
        "gates.weight": (["igate_preact.weight", "fgate_preact.weight"], [n_heads, n_heads]),
        "gates.bias": (["igate_preact.bias", "fgate_preact.bias"], [n_heads, n_heads]),
    }
    return [
        stacked(block.own + own, [theirs + name for name in names], rows) for own, (names, rows) in stacks.items()
    ] + plain_rules({"norm_weight": "multihead_norm.weight", "output_projection": "out_proj"}, block.own, theirs)


def _xlstm_settings(config: LanguageModelConfig, options: _Options) -> dict[str, Any]:
    require(config.logit_cap is not None, "logit_cap", None, "a number, as of an xLSTMForCausalLM")
    d_qk, d_v = _channels(config.d_model, options["mlstm"])
    return {
        "num_heads": options["mlstm"]["n_heads"],
        "qk_dim_factor": _factor(d_qk, config.d_model),
        "v_dim_factor": _factor(d_v, config.d_model),
        "ffn_proj_factor": config.d_channel_mixing / config.d_model,
        "ffn_round_up_to_multiple_of": max(config.d_channel_mixing, 1),
        "output_logit_soft_cap": config.logit_cap,
    }


def _channels(d_model: int, options: dict[str, Any]) -> tuple[int, int]:
    """The channels of queries and keys, and of values, by the mixer's own defaults."""
    return options["d_qk"] or d_model // 2, options["d_v"] or d_model


def _factor(channels: int, d_model: int) -> float:
    """The factor that makes `channels` of d_model, rounded down as transformers does."""
    factor = channels / d_model
    return factor if int(d_model * factor) == channels else math.nextafter(factor, math.inf)


XLSTM = Architecture(
    model_type="xlstm",
    mixer="mlstm",
    names={
        "embedding": "backbone.embeddings",
        "blocks.#.norm_mixing": "backbone.blocks.#.norm_mlstm",
        "blocks.#.norm_feed_forward": "backbone.blocks.#.norm_ffn",
        "blocks.#.feed_forward.gate": "backbone.blocks.#.ffn.proj_up_gate",
        "blocks.#.feed_forward.up": "backbone.blocks.#.ffn.proj_up",
        "blocks.#.feed_forward.down": "backbone.blocks.#.ffn.proj_down",
        "norm": "backbone.out_norm",
        "head.linear": "lm_head",
    },
    config=_xlstm_config,
    settings=_xlstm_settings,
    rules=_xlstm_rules,
    other_names={"embedding_dim": "hidden_size", "num_blocks": "num_hidden_layers"},  # in the published file
)
