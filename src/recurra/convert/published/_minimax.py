"""Lightning attention, softmax attention and experts: transformers' MiniMaxForCausalLM."""

import re
from typing import Any

import torch
from torch import Tensor

from recurra.checks import require, sentence
from recurra.convert.published._rules import (
    EXPERTS,
    NORMS,
    STACK,
    Architecture,
    Block,
    Fused,
    Rule,
    attention_rules,
    expert_rules,
    experts_of,
    heads_of,
    kinds_of,
    plain_rules,
    shape_of,
    stacked,
)
from recurra.convert.published._settings import Settings, written
from recurra.mixers.base import mixer_options
from recurra.models.language_model import LanguageModelConfig

_Options = dict[str, dict[str, Any]]

# --- MiniMax-01 (MiniMaxAI/MiniMax-Text-01-hf) ---

_LINEAR, _ATTENTION = "lightning-attention", "rotary-attention"
_OF_MINIMAX = {"linear_attention": _LINEAR, "full_attention": _ATTENTION}
_PARTS = {"gate_projection": "output_gate", "norm": "norm", "output_projection": "out_proj"}
_SIZES_OF_EXPERTS = {
    "n_experts": ("num_local_experts", 8),
    "top_k": ("num_experts_per_tok", 2),
    "d_expert": ("intermediate_size", 14336),
}
_HALVES = ("full_attn", "linear_attn", "mlp")
_BLOCK = 256


def _minimax_config(settings: Settings, d_model: int, n_layer: int) -> dict[str, Any]:
    settings.only(hidden_act=("silu", "swish"))
    settings.ignore("block_size max_position_embeddings output_router_logits router_aux_loss_coef router_jitter_noise")
    kinds = ["linear_attention" if number % 2 else "full_attention" for number in range(n_layer)]
    kinds = settings.layers("layer_types", _OF_MINIMAX, kinds)
    passed, added = _factors(settings, "alpha"), _factors(settings, "beta")
    attention, epsilon = settings.attention(d_model), settings.number("rms_norm_eps", 1e-5)
    attention |= {"rotation_base": settings.whole_rotation(1e6), "window": settings.optional_size("sliding_window")}
    options = {_LINEAR: {name: attention[name] for name in ("n_heads", "d_head")}, _ATTENTION: attention}
    experts = settings.sizes(_SIZES_OF_EXPERTS)
    # the norms cancel alpha if all inputs to the residual stream are divided by it, and epsilon by its square
    return {
        **shape_of([_OF_MINIMAX[kind] for kind in kinds], options, experts["d_expert"], epsilon / passed**2),
        "feed_forward": EXPERTS,
        "feed_forward_options": experts,
        "norm_place": "stream",
        "embedding_scale": 1 / passed,
        "residual_scale": added / passed,
    }


def _factors(settings: Settings, name: str) -> float:
    """Read the factor of the residual (alpha) or of the branch's output (beta), which all half-blocks must share."""
    found = [settings.positive(f"{half}_{name}_factor") for half in _HALVES]
    names = ", ".join(f"{half}_{name}_factor" for half in _HALVES)
    require(len(set(found)) == 1, names, found, "one number: different ones are not supported")
    return found[0]


def _log_rate(slope: Tensor) -> Tensor:
    if not bool((slope > 0).all()):
        raise ValueError(sentence("slope_rate", f"one with {float(slope.min()):.3g}", "positive numbers"))
    return slope.flatten().log()


def _minimax_rules(block: Block) -> list[Rule]:
    layer = f"model.layers.{block.number}."
    theirs, mixture = f"{layer}self_attn.", f"{layer}block_sparse_moe."
    rules = [
        *plain_rules({"router": "gate"}, block.own_network, mixture),
        *expert_rules(block, f"{mixture}experts.", {"gate": "w1", "up": "w3", "down": "w2"}),
    ]
    if block.mixer == _ATTENTION:
        return [*rules, *attention_rules(block, theirs)]
    ((q, k, v),) = (fused.names for fused in _minimax_fused(block))
    n_heads, _, d_head = heads_of(block)
    rate = (_log_rate, lambda rate: (rate.exp().view(-1, 1, 1),))
    return [
        *rules,
        stacked(f"{block.own}qkv.weight", [q, k, v], [n_heads * d_head] * 3),
        *plain_rules({"log_rate": "slope_rate"}, block.own, theirs, *rate),
        *plain_rules(_PARTS, block.own, theirs),
    ]


def _minimax_fused(block: Block) -> list[Fused]:
    if block.mixer == _ATTENTION:
        return []
    n_heads, _, d_head = heads_of(block)
    name = f"model.layers.{block.number}.self_attn.qkv_proj.weight"
    return [Fused(name, ("q", "k", "v"), n_heads, (d_head, d_head, d_head))]


def _without_powers(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop the precomputed powers of decays that the class stores for its blocks of steps."""
    powers = re.compile(r".*\.self_attn\.(query|key|diagonal)_decay")
    return {name: tensor for name, tensor in weights.items() if not powers.fullmatch(name)}


def _with_powers(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add the powers of decays, for blocks of the class's default length."""
    after = torch.arange(1, _BLOCK + 1, dtype=torch.float32)[:, None]
    weights = dict(weights)
    for name in [name for name in weights if name.endswith(".slope_rate")]:
        slope, beginning = weights[name], name.removesuffix("slope_rate")
        weights[f"{beginning}query_decay"] = torch.exp(-slope * after)
        weights[f"{beginning}key_decay"] = torch.exp(-slope * (_BLOCK - after))
        weights[f"{beginning}diagonal_decay"] = torch.exp(-slope * (after - after.T)).tril()[None]
    return weights


def _minimax_settings(config: LanguageModelConfig, options: _Options) -> dict[str, Any]:
    passed, linear = 1 / config.embedding_scale, options[_LINEAR]
    attention = options.get(_ATTENTION, mixer_options(_ATTENTION) | {"window": None, "n_heads": linear["n_heads"]})
    _, n_kv_heads, _ = heads_of(Block(0, _ATTENTION, attention, config.d_model))
    factors = {"alpha": passed, "beta": config.residual_scale * passed}
    return {
        **written(experts_of(config), _SIZES_OF_EXPERTS),
        **{f"{half}_{name}_factor": factor for half in _HALVES for name, factor in factors.items()},
        "layer_types": kinds_of(config, _OF_MINIMAX),
        "block_size": _BLOCK,
        "num_attention_heads": linear["n_heads"],
        "num_key_value_heads": n_kv_heads,
        "head_dim": linear["d_head"] or config.d_model // linear["n_heads"],
        "sliding_window": attention["window"],
        "attention_dropout": attention["dropout"],
        "rope_parameters": {"rope_type": "default", "rope_theta": attention["rotation_base"]},
        "rms_norm_eps": config.norm_epsilon * passed**2,
    }


MINIMAX = Architecture(
    model_type="minimax",
    mixer=_LINEAR,
    names=STACK | NORMS,
    config=_minimax_config,
    settings=_minimax_settings,
    rules=_minimax_rules,
    fused=_minimax_fused,
    other_names={"num_experts": "num_local_experts"},
    other_layout=_without_powers,
    derived=_with_powers,
)
