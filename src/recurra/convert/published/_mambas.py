"""Mamba: transformers' Mamba, FalconMamba, Mamba2, Jamba and Zamba2ForCausalLM, and the authors' own folders."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from recurra.checks import choose, require, sentence
from recurra.convert.published._rules import (
    EXPERTS,
    SWIGLU,
    Architecture,
    Block,
    Rule,
    Stack,
    networks_of,
    plain_rules,
    reordered,
    shape_of,
)
from recurra.convert.published._settings import Settings, written

_MAMBA_1 = {
    "input_projection": "in_proj",
    "convolution": "conv1d",
    "selection": "x_proj",
    "step_projection": "dt_proj",
    "step_bias": "dt_proj.bias",
    "log_decay": "A_log",
    "skip": "D",
    "output_projection": "out_proj",
}
PARTS_OF_MAMBA2 = {
    "input_projection": "in_proj",
    "convolution": "conv1d",
    "step_bias": "dt_bias",
    "log_decay": "A_log",
    "skip": "D",
    "norm": "norm",
    "output_projection": "out_proj",
}
_STACK = {
    "embedding": "backbone.embeddings",
    "blocks.#.norm_mixing": "backbone.layers.#.norm",
    "norm": "backbone.norm_f",
    "head": "lm_head",
}
_OTHER_NAMES = {"d_model": "hidden_size", "n_layer": "num_hidden_layers"}
_OTHER_TENSORS = {"backbone.embedding.": "backbone.embeddings."}  # in the authors' folders
_HOW_IT_RUNS = """
residual_in_fp32 rescale_prenorm_residual use_mambapy use_associative_scan use_falcon_mambapy fused_add_norm
pad_vocab_size_multiple layer_types time_step_scale time_step_min time_step_max time_step_init_scheme time_step_floor
"""


def _take_common(settings: Settings) -> None:
    settings.only(use_bias=False, use_conv_bias=True, hidden_act=("silu", "swish"), rms_norm=True, ssm_cfg={})
    settings.ignore(_HOW_IT_RUNS)


# --- Mamba (state-spaces/mamba-*-hf) and Falcon Mamba, which normalises what selects ---

_SIZES = {"d_state": ("state_size", 16), "d_conv": ("conv_kernel", 4)}


def _mamba_config(settings: Settings, d_model: int, n_layer: int) -> dict[str, Any]:
    _take_common(settings)
    inner = settings.size("intermediate_size", settings.size("expand", 2) * d_model)
    if inner % d_model:
        raise ValueError(sentence("intermediate_size", inner, f"a multiple of hidden_size = {d_model}"))
    settings.only(d_inner=inner)
    rank = settings.optional_size("time_step_rank", absent="auto") or math.ceil(d_model / 16)
    return {
        "mixer_options": {**settings.options(_SIZES), "expand": inner // d_model, "dt_rank": rank},
        "norm_epsilon": settings.number("layer_norm_epsilon", 1e-5),
    }


def _mamba_settings(stack: Stack) -> dict[str, Any]:
    mamba, config = stack.mixer("mamba"), stack.config
    entries = {"expand": mamba["expand"], "time_step_rank": mamba["dt_rank"] or math.ceil(config.d_model / 16)}
    return {**written(mamba, _SIZES), **entries, "layer_norm_epsilon": config.norm_epsilon}


def _falcon_config(settings: Settings, d_model: int, n_layer: int) -> dict[str, Any]:
    epsilon = settings.number("mixer_rms_eps", 1e-6)
    shape = _mamba_config(settings, d_model, n_layer)
    return {**shape, "mixer_options": {**shape["mixer_options"], "selection_norm": epsilon}}


def _falcon_settings(stack: Stack) -> dict[str, Any]:
    return {**_mamba_settings(stack), "mixer_rms_eps": stack.mixer("mamba")["selection_norm"]}


def _is_falcon(stack: Stack) -> bool:
    return not stack.config.d_channel_mixing and stack.mixer("mamba")["selection_norm"] is not None


MAMBA = Architecture(
    model_type="mamba",
    mixer="mamba",
    names=_STACK | {f"blocks.#.mixer.{own}": f"backbone.layers.#.mixer.{name}" for own, name in _MAMBA_1.items()},
    config=_mamba_config,
    settings=_mamba_settings,
    fits=lambda stack: not stack.config.d_channel_mixing and not _is_falcon(stack),
    tied=True,
    other_names=_OTHER_NAMES,
    other_tensors=_OTHER_TENSORS,
)
FALCON_MAMBA = MAMBA._replace(
    model_type="falcon_mamba",
    config=_falcon_config,
    settings=_falcon_settings,
    fits=_is_falcon,
)


# --- Mamba-2 (mistralai/Mamba-Codestral-7B, state-spaces/mamba2-*) ---

_SIZES_2 = {
    "d_state": ("state_size", 128),
    "d_conv": ("conv_kernel", 4),
    "n_groups": ("n_groups", 8),
    "expand": ("expand", 2),
    "n_heads": ("num_heads", 128),
}


NO_LIMIT = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
"""Of step sizes: transformers writes infinity as an object, since JSON has none; others write it as Infinity."""


def _mamba2_config(settings: Settings, d_model: int, n_layer: int) -> dict[str, Any]:
    _take_common(settings)
    options = settings.options(_SIZES_2)
    inner, got = options["expand"] * d_model, options["n_heads"] * settings.size("head_dim", 64)
    require(got == inner, "num_heads * head_dim", got, f"expand * hidden_size = {inner}")
    settings.only(time_step_limit=NO_LIMIT)
    epsilon = settings.number("layer_norm_epsilon", 1e-5)
    # norm_before_gate is true in published files; transformers' class always gates first
    settings.ignore("norm_before_gate chunk_size time_step_rank intermediate_size")
    return {"mixer_options": {**options, "norm_epsilon": epsilon}, "norm_epsilon": epsilon}


def _mamba2_settings(stack: Stack) -> dict[str, Any]:
    mamba, n_heads = stack.mixer("mamba2"), heads_of_mamba2(stack, stack.mixer("mamba2"))
    return {
        **written(mamba | {"n_heads": n_heads}, _SIZES_2),
        "head_dim": mamba["expand"] * stack.config.d_model // n_heads,
        "layer_norm_epsilon": stack.config.norm_epsilon,
    }


def heads_of_mamba2(stack: Stack, mamba: dict[str, Any]) -> int:
    """Heads of mamba2, by its own default."""
    return int(mamba["n_heads"] or max(mamba["expand"] * stack.config.d_model // 64, 1))


MAMBA2 = Architecture(
    model_type="mamba2",
    mixer="mamba2",
    names=_STACK
    | {f"blocks.#.mixer.{own}": f"backbone.layers.#.mixer.{name}" for own, name in PARTS_OF_MAMBA2.items()},
    config=_mamba2_config,
    settings=_mamba2_settings,
    fits=lambda stack: not stack.config.d_channel_mixing,
    other_names=_OTHER_NAMES,
    other_tensors=_OTHER_TENSORS,
)


# --- Mamba and Mamba-2 in folders of the authors' own code (state-spaces/mamba-130m, state-spaces/mamba2-130m) ---

_SSM = {"state_size": ("d_state", 16), "conv_kernel": ("d_conv", 4), "expand": ("expand", 2)}
_SSM_2 = _SSM | {"state_size": ("d_state", 128), "n_groups": ("ngroups", 1), "head_dim": ("headdim", 64)}
_OF_TRAINING = """
layer dt_min dt_max dt_init dt_scale dt_init_floor A_init_range conv_init chunk_size use_fast_path use_mem_eff_path
"""


def of_the_authors(entries: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Make the entries of transformers' config.json of those of the authors' own, which is called `name`."""
    settings, section = Settings(entries, name), entries.get("ssm_cfg", {})
    require(isinstance(section, dict), f"ssm_cfg in {name}", section, "an object")
    ssm = Settings(section, f"ssm_cfg in {name}")
    kinds = {"Mamba1": "mamba", "Mamba2": "mamba2"}
    kind = choose(f"layer in ssm_cfg in {name}", kinds, section.get("layer", "Mamba1"))
    d_model, multiple = settings.size("d_model"), settings.size("pad_vocab_size_multiple", 8)
    shape: dict[str, Any] = ssm.options(_SSM_2 if kind == "mamba2" else _SSM)
    if kind == "mamba2":
        shape["num_heads"] = shape["expand"] * d_model // shape["head_dim"]
        ssm.only(d_ssm=None, rmsnorm=True, norm_before_gate=False, D_has_hdim=False, dt_limit=[0.0, math.inf])
    else:
        shape["time_step_rank"] = ssm.optional_size("dt_rank", absent="auto") or "auto"
    ssm.only(bias=False, conv_bias=True)
    ssm.ignore(_OF_TRAINING)
    ssm.finish()
    shape |= {"hidden_size": d_model, "num_hidden_layers": settings.size("n_layer"), "model_type": kind}
    shape["vocab_size"] = math.ceil(settings.size("vocab_size") / multiple) * multiple
    shape["tie_word_embeddings"] = settings.flag("tie_embeddings", True)
    settings.only(rms_norm=True, d_intermediate=0, attn_layer_idx=[])  # their attention has a convolution
    settings.ignore("ssm_cfg attn_cfg residual_in_fp32 fused_add_norm")
    settings.finish()
    return shape


# --- Jamba (ai21labs/Jamba-v0.1, AI21-Jamba-Mini; AI21-Jamba-Reasoning-3B has dense feed-forward networks alone) ---

ATTENTION = "rotary-attention"
_SIZES_OF_JAMBA = {"d_state": ("mamba_d_state", 16), "d_conv": ("mamba_d_conv", 4), "expand": ("mamba_expand", 2)}
_NORMS = {"step_norm": "dt_layernorm", "b_norm": "b_layernorm", "c_norm": "c_layernorm"}


def _jamba_config(settings: Settings, d_model: int, n_layer: int) -> dict[str, Any]:
    period, offset = settings.size("expert_layer_period", 2), settings.size("expert_layer_offset", 1, least=0)
    n_experts, top_k = settings.size("num_experts", 16), settings.size("num_experts_per_tok", 2)
    networks = [EXPERTS if n_experts > 1 and n % period == offset else "swiglu" for n in range(n_layer)]
    experts = {"n_experts": n_experts, "top_k": top_k, "normalise": False}
    period, offset = settings.size("attn_layer_period", 8), settings.size("attn_layer_offset", 4, least=0)
    mixers = [ATTENTION if number % period == offset else "mamba" for number in range(n_layer)]
    settings.only(layers_block_type=["mamba" if name == "mamba" else "attention" for name in mixers])
    settings.only(hidden_act=("silu", "swish"), mamba_conv_bias=True, mamba_proj_bias=False, sliding_window=None)
    settings.ignore("output_router_logits router_aux_loss_coef max_position_embeddings layer_types")
    settings.ignore("num_logits_to_keep use_mamba_kernels use_mambapy use_associative_scan")
    epsilon, n_heads = settings.number("rms_norm_eps", 1e-6), settings.size("num_attention_heads", 32)
    options: dict[str, dict[str, Any]] = {
        "mamba": {
            **settings.options(_SIZES_OF_JAMBA),
            "dt_rank": settings.optional_size("mamba_dt_rank", absent="auto") or math.ceil(d_model / 16),
            "selection_norm": epsilon,
            "selection_scales": True,
        },
        ATTENTION: {
            "n_heads": n_heads,
            "n_kv_heads": settings.optional_size("num_key_value_heads", 8) or n_heads,
            "dropout": settings.number("attention_dropout", 0.0),
            "rotated_share": 0.0,
            "window": None,
        },
    }
    shape = shape_of(mixers, options, settings.size("intermediate_size", 14336), epsilon)
    return {**shape, **networks_of(networks, experts)}


def regular_places(chosen: Sequence[bool], name: str, got: Any, what: str) -> tuple[int, int]:
    """Return the period and the offset of the blocks with `what`, as a Jamba has them; `name` and `got` for errors."""
    places = [place for place, is_chosen in enumerate(chosen) if is_chosen] or [len(chosen)]
    first = places[0]
    period = places[1] - first if places[1:] else max(first + 1, len(chosen) - first)
    if first < period and list(chosen) == [number % period == first for number in range(len(chosen))]:
        return period, first
    raise ValueError(sentence(name, got, f"{what} at equal distances, as of a JambaForCausalLM"))


def _jamba_rules(block: Block) -> list[Rule]:
    theirs = f"model.layers.{block.number}"
    experts = block.experts(f"{theirs}.feed_forward.experts.", SWIGLU)
    if block.mixer == ATTENTION:
        return [*block.attention(f"{theirs}.self_attn."), *experts]
    return [*block.plain(_MAMBA_1 | _NORMS, f"{theirs}.mamba."), *experts]


def _jamba_settings(stack: Stack) -> dict[str, Any]:
    config, attention = stack.config, stack.mixer(ATTENTION)
    attends, sparse = [name == ATTENTION for name in stack.mixers], [x == EXPERTS for x in config.feed_forwards]
    period, offset = regular_places(attends, "mixer", config.mixer, "attention")
    expert_period, expert_offset = regular_places(sparse, "feed_forward", config.feed_forward, "experts")
    return {
        **written(stack.mixer("mamba"), _SIZES_OF_JAMBA),
        "mamba_dt_rank": stack.mixer("mamba")["dt_rank"] or math.ceil(config.d_model / 16),
        "intermediate_size": config.d_channel_mixing,
        "num_experts": stack.experts["n_experts"] if stack.has_experts else 1,
        "num_experts_per_tok": stack.experts["top_k"],
        "expert_layer_period": expert_period,
        "expert_layer_offset": expert_offset,
        "attn_layer_period": period,
        "attn_layer_offset": offset,
        "num_attention_heads": attention["n_heads"],
        "num_key_value_heads": attention["n_kv_heads"] or attention["n_heads"],
        "attention_dropout": attention["dropout"],
        "rms_norm_eps": config.norm_epsilon,
    }


JAMBA = Architecture(
    model_type="jamba",
    mixer="mamba",
    names={
        "embedding": "model.embed_tokens",
        "blocks.#.norm_mixing": "model.layers.#.input_layernorm",
        "blocks.#.norm_feed_forward": "model.layers.#.pre_ff_layernorm",
        **{f"blocks.#.feed_forward.{own}": f"model.layers.#.feed_forward.{name}" for own, name in SWIGLU.items()},
        "blocks.#.feed_forward.router": "model.layers.#.feed_forward.router",
        "norm": "model.final_layernorm",
        "head": "lm_head",
    },
    config=_jamba_config,
    settings=_jamba_settings,
    rules=_jamba_rules,
    fits=lambda stack: stack.config.d_channel_mixing > 0,
)


# --- Zamba2: Mamba-2, and attention shared between layers (Zyphra/Zamba2-1.2B, -2.7B, -7B) ---

_HYBRID = "zamba2"
_OF_ZAMBA = {"linear_attention": "mamba2", "hybrid": _HYBRID, "mamba": "mamba2"}
_SIZES_OF_ZAMBA = {"d_state": ("mamba_d_state", 64), "d_conv": ("mamba_d_conv", 4), "n_groups": ("mamba_ngroups", 1)}
_OPTIONS_OF_HYBRIDS = {
    "n_heads": ("num_attention_heads", 32),
    "rank": ("adapter_rank", 128),
    "n_shared": ("num_mem_blocks", 1),
    "dropout": ("attention_dropout", 0.0),
    "adapts_attention": ("use_shared_attention_adapter", False),
}
_OWN = {"projection": "linear", "norm_mamba": "mamba_decoder.input_layernorm"}
_SHARED = {
    "norm_attention": "input_layernorm",
    "norm_feed_forward": "pre_ff_layernorm",
    "gate_up.linear": "feed_forward.gate_up_proj",
    "down": "feed_forward.down_proj",
}
_HOW_ZAMBA_RUNS = """
chunk_size max_position_embeddings num_logits_to_keep time_step_floor time_step_max use_conv_bias use_mamba_kernels
use_mem_eff_path
"""


def _zamba_config(settings: Settings, d_model: int, n_layer: int) -> dict[str, Any]:
    settings.only(add_bias_linear=False, hidden_act="gelu", use_long_context=False)
    settings.ignore(_HOW_ZAMBA_RUNS)
    usual = ["hybrid" if number in (6, 12, 18, 24, 30, 36, 42, 47, 51) else "mamba" for number in range(n_layer)]
    mixers = settings.layers("layers_block_type", _OF_ZAMBA, usual)
    sizes, own = settings.options(_SIZES_OF_ZAMBA), settings.options(_OPTIONS_OF_HYBRIDS)
    epsilon, least_step = settings.number("rms_norm_eps", 1e-5), settings.positive("time_step_min", 0.001)
    inner, mamba_heads = settings.size("mamba_expand", 2) * d_model, settings.size("n_mamba_heads", 8)
    n_heads, n_kv_heads = own["n_heads"], settings.optional_size("num_key_value_heads") or own["n_heads"]
    has_usual = n_kv_heads == n_heads or not own["adapts_attention"]
    require(has_usual, "num_key_value_heads", n_kv_heads, f"{n_heads} with adapters")
    settings.only(attention_head_dim=2 * d_model // n_heads, attention_hidden_size=2 * d_model)
    settings.only(kv_channels=d_model // n_heads, num_query_groups=n_heads, mamba_headdim=inner // mamba_heads)
    settings.only(hybrid_layer_ids=[number for number, name in enumerate(mixers) if name == _HYBRID])
    base, rotates = settings.whole_rotation(), settings.flag("use_mem_rope", False)
    mamba = {**sizes, "d_inner": inner, "least_step": least_step}
    options: dict[str, dict[str, Any]] = {
        "mamba2": mamba | {"n_heads": mamba_heads},
        _HYBRID: {
            **mamba,
            **own,
            "n_mamba_heads": mamba_heads,
            "n_kv_heads": n_kv_heads,
            "rotated_share": float(rotates),
            "rotation_base": base,
            "window": None,
            "d_hidden": settings.optional_size("intermediate_size") or 4 * d_model,
            "norm_epsilon": epsilon,
        },
    }
    return {
        "mixer": mixers,
        "mixer_options": {name: options[name] for name in dict.fromkeys(mixers)},
        "norm_epsilon": epsilon,
    }


def _zamba_rules(block: Block) -> list[Rule]:
    layer = f"model.layers.{block.number}."
    if block.mixer == "mamba2":
        norm = plain_rules({"norm_mixing": "input_layernorm"}, f"blocks.{block.number}.", layer)
        return [*norm, *block.plain(PARTS_OF_MAMBA2, f"{layer}mamba.")]
    turn = block.turns.index(block.number)
    theirs = f"model.layers.{block.turns[turn % block.options['n_shared']]}.shared_transformer."
    return [
        *block._replace(part="mamba.").plain(PARTS_OF_MAMBA2, f"{layer}mamba_decoder.mamba."),
        *block.plain(_OWN, layer),
        *block.plain(_SHARED, theirs),
        *_adapter_rules(f"{block.own}gate_up.adapters.0", f"{theirs}feed_forward.gate_up_proj_adapter_list.{turn}"),
        *_shared_attention_rules(block, f"{theirs}self_attn.", turn),
    ]


def _shared_attention_rules(block: Block, theirs: str, turn: int) -> list[Rule]:
    d_head = 2 * block.d_model // block.options["n_heads"]
    attention = block._replace(part="attention.", options=block.options | {"d_head": d_head})
    rules = attention.attention(theirs, own="qkv.linear")
    for number, name in enumerate("qkv"):
        adapter = f"{attention.own}qkv.adapters.{number}", f"{theirs}linear_{name}_adapter_list.{turn}"
        rules += _adapter_rules(*adapter, None if name == "v" else attention.turned_pairs)
    return rules


def _adapter_rules(own: str, theirs: str, order: torch.Tensor | None = None) -> list[Rule]:
    order = torch.arange(1) if order is None else order
    back = torch.argsort(order)
    places = (f"{own}.", f"{theirs}.")
    second = plain_rules({"1": "1"}, *places, lambda x: reordered(x, order), lambda x: (reordered(x, back),))
    return [*plain_rules({"0": "0"}, *places), *second]


def _zamba_settings(stack: Stack) -> dict[str, Any]:
    hybrid, config = stack.mixer(_HYBRID), stack.config
    inner = hybrid["d_inner"] or 2 * config.d_model
    return {
        **written(hybrid, _SIZES_OF_ZAMBA | _OPTIONS_OF_HYBRIDS),
        "layers_block_type": [kind if kind == "hybrid" else "linear_attention" for kind in stack.kinds(_OF_ZAMBA)],
        "mamba_expand": max(inner // config.d_model, 1),
        "n_mamba_heads": heads_of_mamba2(stack, {"expand": 2, "n_heads": hybrid["n_mamba_heads"]}),
        "time_step_min": hybrid["least_step"],
        "intermediate_size": hybrid["d_hidden"] or 4 * config.d_model,
        "num_key_value_heads": hybrid["n_kv_heads"] or hybrid["n_heads"],
        "use_mem_rope": hybrid["rotated_share"] > 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": hybrid["rotation_base"]},
        "rms_norm_eps": config.norm_epsilon,
    }


ZAMBA2 = Architecture(
    model_type="zamba2",
    mixer=_HYBRID,
    names={"embedding": "model.embed_tokens", "norm": "model.final_layernorm", "head": "lm_head"},
    config=_zamba_config,
    settings=_zamba_settings,
    rules=_zamba_rules,
    fits=lambda stack: stack.config.tie_embeddings,  # without tying, the class shares no weights
    tied=True,
    other_names={"layer_types": "layers_block_type"},
)
