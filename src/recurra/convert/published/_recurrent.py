"""RWKV-4 from transformers' RwkvForCausalLM (RWKV/rwkv-4-*-pile), RWKV-7 from its authors' files and
flash-linear-attention's RWKV7ForCausalLM, and xLSTM from xLSTMForCausalLM (NX-AI/xLSTM-7b).
"""

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recurra.checks import require, sentence
from recurra.convert.published._rules import Architecture, Block, Rule, Stack, plain_rules
from recurra.convert.published._settings import Settings
from recurra.mixers.rwkv7 import usual_heads


def _row(vector: Tensor) -> tuple[Tensor, ...]:
    """A vector with dimensions of one batch and one step, as both code bases keep some."""
    return (vector.view(1, 1, -1),)


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
        *block.plain(_WEIGHTS, mixer),
        # with dimensions of one batch and one step there
        *block.plain(_SHARES, mixer, torch.flatten, _row),
    ]


def _rwkv_settings(stack: Stack) -> dict[str, Any]:
    d_model = stack.config.d_model
    return {
        "num_hidden_layers": max(stack.config.n_layer // 2, 1),
        "attention_hidden_size": stack.mixer(_TIME)["d_wkv"] or d_model,
        "intermediate_size": stack.mixer(_CHANNELS)["d_hidden"] or 4 * d_model,
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


# --- RWKV-7: the authors' .pth files (BlinkDL/rwkv7-g1), and folders of flash-linear-attention's RWKV7ForCausalLM ---

_TIME_7, _CHANNELS_7 = "rwkv7", "rwkv7-channel-mixing"
_EPSILON = 64e-5  # of the norm of heads, in the authors' code, whatever their size
_SHIFTS = [f"x_{name}" for name in "rwkvag"]
_IN_BOTH = {"removal_scale": "k_k", "rate_share": "k_a", "bonus": "r_k"}
LOW_RANK = {"decay": "w", "rate": "a", "value": "v", "gate": "g"}
RANKS = {f"{own}_rank": f"{theirs}_low_rank_dim" for own, theirs in zip(LOW_RANK, ("decay", "a", "v", "gate"))}

# fla's names, and the authors' where they have a module; theirs of low rank are w0 (the bias), w1 and w2
_LINEAR = {
    "receptance": ("r_proj", "receptance"),
    "key": ("k_proj", "key"),
    "value": ("v_proj", "value"),
    "output_projection": ("o_proj", "output"),
}


def _rwkv7_config(settings: Settings, d_model: int, n_layer: int, head_epsilon: float | None = None) -> dict[str, Any]:
    """Make the shape; fla's norm of heads adds head_dim * norm_eps to the variance."""
    n_heads, d_head = settings.optional_size("num_heads") or 0, settings.optional_size("head_dim", 64)
    if d_head is not None:  # there it goes first, and num_heads is not read
        n_heads = d_model // d_head if d_model % d_head == 0 else 0
    require(n_heads > 0, "head_dim", d_head, f"a divisor of hidden_size = {d_model}, or num_heads in its place")
    epsilon, ratio = settings.number("norm_eps", 1e-5), settings.channels("hidden_ratio", 4, d_model)
    hidden = settings.optional_size("intermediate_size") or -(-int(ratio) // 32) * 32
    settings.only(hidden_act="sqrelu", norm_bias=True, attn=None, value_dim=(None, d_model, [d_model] * n_layer))
    settings.ignore("attn_mode fuse_norm fuse_cross_entropy fuse_linear_cross_entropy use_l2warp")
    settings.ignore("max_position_embeddings")
    ranks = {own: settings.optional_size(theirs) for own, theirs in RANKS.items()}
    head_epsilon = d_model // n_heads * epsilon if head_epsilon is None else head_epsilon
    return {
        "n_layer": 2 * n_layer,
        "mixer": [_TIME_7, _CHANNELS_7] * n_layer,
        "mixer_options": {
            _TIME_7: {"n_heads": n_heads, **ranks, "norm_epsilon": head_epsilon},
            _CHANNELS_7: {"d_hidden": hidden},
        },
        "norm": "layer",
        "norm_epsilon": epsilon,
        "embedding_norm": settings.flag("norm_first", True),
    }


def _rwkv7_settings(stack: Stack) -> dict[str, Any]:
    config, time = stack.config, stack.mixer(_TIME_7)
    return {
        "num_hidden_layers": max(config.n_layer // 2, 1),
        "head_dim": config.d_model // (time["n_heads"] or usual_heads(config.d_model)),
        "intermediate_size": stack.mixer(_CHANNELS_7)["d_hidden"] or 4 * config.d_model,
        "norm_first": config.embedding_norm,
        "norm_eps": config.norm_epsilon,
        **{theirs: time[own] for own, theirs in RANKS.items()},
    }


def _shift_rule(block: Block, theirs: str) -> Rule:
    return Rule(
        re.escape(f"{block.own}shift"),
        tuple(theirs + name for name in _SHIFTS),
        lambda *rows: torch.stack([row.flatten() for row in rows]),
        lambda shifts: tuple(row.view(1, 1, -1) for row in shifts),
    )


def _rules_of_fla(block: Block) -> list[Rule]:
    layer, half = divmod(block.number, 2)
    theirs = f"model.layers.{layer}."
    norm = plain_rules({f"blocks.{block.number}.norm_mixing": f"{theirs}{('attn', 'ffn')[half]}_norm"})
    if half:
        names = {"shift": "x_k", "key": "key", "output_projection": "value"}
        return [*norm, *block.plain(names, f"{theirs}ffn.")]
    theirs += "attn."
    names = {own: name for own, (name, _) in _LINEAR.items()} | _IN_BOTH
    names |= {"norm_weight": "g_norm.weight", "norm_bias": "g_norm.bias", "decay_bias": "w_lora.lora.2.bias"}
    for own, letter in LOW_RANK.items():
        names |= {f"{own}_projection.{number}": f"{letter}_lora.lora.{number}" for number in (0, 2)}
    return [*norm, _shift_rule(block, theirs), *block.plain(names, theirs)]


def _rules_of_the_authors(block: Block) -> list[Rule]:
    layer, half = divmod(block.number, 2)
    theirs = f"blocks.{layer}."
    norm = plain_rules({f"blocks.{block.number}.norm_mixing": f"{theirs}ln{half + 1}"})
    mixer = f"{theirs}{('att', 'ffn')[half]}."
    if half:
        names = {"key": "key", "output_projection": "value"}
        return [*norm, *block.plain({"shift": "x_k"}, mixer, torch.flatten, _row), *block.plain(names, mixer)]
    vectors = {own: name for own, name in _IN_BOTH.items() if own != "bonus"} | {"decay_bias": "w0"}
    vectors |= {f"{own}_projection.2.bias": f"{LOW_RANK[own]}0" for own in ("rate", "value")}
    matrices = {
        f"{own}_projection.{number}.weight": letter + digit
        for own, letter in LOW_RANK.items()
        for number, digit in ((0, "1"), (2, "2"))
    }
    names = {own: name for own, (_, name) in _LINEAR.items()}
    names |= {"norm_weight": "ln_x.weight", "norm_bias": "ln_x.bias", "bonus": "r_k"}
    return [
        *norm,
        _shift_rule(block, mixer),
        *block.plain(vectors, mixer, torch.flatten, _row),
        *block.plain(matrices, mixer, torch.t, lambda matrix: (matrix.t(),)),
        *block.plain(names, mixer),
    ]


RWKV7 = Architecture(
    model_type="rwkv7",
    mixer=_TIME_7,
    names={
        "embedding": "model.embeddings",
        "embedding_norm": "model.layers.0.pre_norm",
        "norm": "model.norm",
        "head": "lm_head",
    },
    config=_rwkv7_config,
    settings=_rwkv7_settings,
    rules=_rules_of_fla,
)

OF_THE_AUTHORS = RWKV7._replace(
    settings=lambda stack: {**_rwkv7_settings(stack), "norm_first": True, "norm_eps": 1e-5},
    names={"embedding": "emb", "embedding_norm": "blocks.0.ln0", "norm": "ln_out", "head": "head"},
    config=partial(_rwkv7_config, head_epsilon=_EPSILON),
    rules=_rules_of_the_authors,
    head="head.weight",
)
"""A .pth file, with the config.json that it does not have."""


def entries_of_pth(weights: Mapping[str, Tensor], name: str) -> dict[str, Any]:
    """Make the config.json of a .pth file, called `name`, from the shapes of its tensors."""

    def shape(key: str, n_dimensions: int = 2) -> tuple[int, ...]:
        if key not in weights or weights[key].dim() != n_dimensions:
            got = "none" if key not in weights else f"one of shape {tuple(weights[key].shape)}"
            raise ValueError(sentence(f"{key} in {name}", got, "a matrix, as in an RWKV-7 model"))
        return tuple(weights[key].shape)

    vocab_size, d_model = shape("emb.weight")
    layers = {match[1] for key in weights if (match := re.match(r"blocks\.(\d{1,6})\.", key))}
    first = {"v": 1}  # layer with such a matrix
    ranks = {
        theirs: shape(f"blocks.{first.get(letter, 0)}.att.{letter}1")[1]
        for theirs, letter in zip(RANKS.values(), LOW_RANK.values())
        if first.get(letter, 0) < len(layers)
    }
    return {
        "vocab_size": vocab_size,
        "hidden_size": d_model,
        "num_hidden_layers": len(layers),
        "head_dim": shape("blocks.0.att.r_k")[1],
        "intermediate_size": shape("blocks.0.ffn.key.weight")[0],
        **ranks,
    }


def without_unused(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop what the authors' code makes and never reads: how a first layer would take the first layer's values."""
    return {key: tensor for key, tensor in weights.items() if not re.fullmatch(r"blocks\.0\.att\.v[012]", key)}


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
    projections, gates = ("q", "k", "v", "ogate_preact"), ("igate_preact", "fgate_preact")
    return [
        block.stacked("qkvo.weight", [f"{theirs}{name}.weight" for name in projections], [d_qk, d_qk, d_v, d_v]),
        block.stacked("gates.weight", [f"{theirs}{name}.weight" for name in gates], [n_heads, n_heads]),
        block.stacked("gates.bias", [f"{theirs}{name}.bias" for name in gates], [n_heads, n_heads]),
        *block.plain({"norm_weight": "multihead_norm.weight", "output_projection": "out_proj"}, theirs),
    ]


def _xlstm_settings(stack: Stack) -> dict[str, Any]:
    config, options = stack.config, stack.mixer("mlstm")
    require(config.logit_cap is not None, "logit_cap", None, "a number, as of an xLSTMForCausalLM")
    d_qk, d_v = _channels(config.d_model, options)
    return {
        "num_heads": options["n_heads"],
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
