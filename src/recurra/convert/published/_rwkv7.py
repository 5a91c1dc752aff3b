"""RWKV-7: the authors' .pth files (BlinkDL/rwkv7-g1), and folders of flash-linear-attention's RWKV7ForCausalLM."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recurra.checks import require, sentence
from recurra.convert.published._rules import Architecture, Block, Rule, Settings, plain_rules
from recurra.mixers.rwkv7 import usual_heads
from recurra.models.language_model import LanguageModelConfig

_TIME, _CHANNELS = "rwkv7", "rwkv7-channel-mixing"
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


def _config(settings: Settings, d_model: int, n_layer: int, head_epsilon: float | None = None) -> dict[str, Any]:
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
        "mixer": [_TIME, _CHANNELS] * n_layer,
        "mixer_options": {
            _TIME: {"n_heads": n_heads, **ranks, "norm_epsilon": head_epsilon},
            _CHANNELS: {"d_hidden": hidden},
        },
        "norm": "layer",
        "norm_epsilon": epsilon,
        "embedding_norm": settings.flag("norm_first", True),
    }


def _settings(config: LanguageModelConfig, options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    time, channels = options[_TIME], options.get(_CHANNELS, {"d_hidden": None})
    return {
        "num_hidden_layers": max(config.n_layer // 2, 1),
        "head_dim": config.d_model // (time["n_heads"] or usual_heads(config.d_model)),
        "intermediate_size": channels["d_hidden"] or 4 * config.d_model,
        "norm_first": config.embedding_norm,
        "norm_eps": config.norm_epsilon,
        **{theirs: time[own] for own, theirs in RANKS.items()},
    }


def _row(vector: Tensor) -> tuple[Tensor, ...]:
    """A vector with dimensions of one batch and one step, as both code bases keep some."""
    return (vector.view(1, 1, -1),)


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
        return [*norm, *plain_rules(names, block.own, f"{theirs}ffn.")]
    theirs += "attn."
    names = {own: name for own, (name, _) in _LINEAR.items()} | _IN_BOTH
    names |= {"norm_weight": "g_norm.weight", "norm_bias": "g_norm.bias", "decay_bias": "w_lora.lora.2.bias"}
    for own, letter in LOW_RANK.items():
        names |= {f"{own}_projection.{number}": f"{letter}_lora.lora.{number}" for number in (0, 2)}
    return [*norm, _shift_rule(block, theirs), *plain_rules(names, block.own, theirs)]


def _rules_of_the_authors(block: Block) -> list[Rule]:
    layer, half = divmod(block.number, 2)
    theirs = f"blocks.{layer}."
    norm = plain_rules({f"blocks.{block.number}.norm_mixing": f"{theirs}ln{half + 1}"})
    rules = partial(plain_rules, own=block.own, theirs=f"{theirs}{('att', 'ffn')[half]}.")
    if half:
        names = {"key": "key", "output_projection": "value"}
        return [*norm, *rules({"shift": "x_k"}, read=torch.flatten, write=_row), *rules(names)]
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
        _shift_rule(block, f"{theirs}att."),
        *rules(vectors, read=torch.flatten, write=_row),
        *rules(matrices, read=torch.t, write=lambda matrix: (matrix.t(),)),
        *rules(names),
    ]


RWKV7 = Architecture(
    model_type="rwkv7",
    mixer=_TIME,
    names={
        "embedding": "model.embeddings",
        "embedding_norm": "model.layers.0.pre_norm",
        "norm": "model.norm",
        "head": "lm_head",
    },
    config=_config,
    settings=_settings,
    rules=_rules_of_fla,
)

OF_THE_AUTHORS = RWKV7._replace(
    settings=lambda config, options: {**_settings(config, options), "norm_first": True, "norm_eps": 1e-5},
    names={"embedding": "emb", "embedding_norm": "blocks.0.ln0", "norm": "ln_out", "head": "head"},
    config=partial(_config, head_epsilon=_EPSILON),
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
