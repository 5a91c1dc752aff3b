"""Gated DeltaNets and attention: transformers' Qwen3NextForCausalLM, Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM and
OlmoHybridForCausalLM.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recurra.checks import require
from recurra.convert.published._rules import (
    EXPERTS,
    NORMS,
    STACK,
    SWIGLU,
    Architecture,
    Block,
    Fused,
    Rule,
    Stack,
    networks_of,
    plain_rules,
    rotation_entries,
    shape_of,
    unpacked_experts,
)
from recurra.convert.published._settings import Settings, written

# --- Qwen3-Next (Qwen/Qwen3-Next-80B-A3B-Instruct); Qwen3.5, dense (Qwen/Qwen3.5-0.8B, -27B) or not (-35B-A3B) ---

_LINEAR, _ATTENTION = "gated-delta-net", "gated-attention"
_OF_QWEN = {"linear_attention": _LINEAR, "full_attention": _ATTENTION}
_HEADS = {
    "n_heads": ("num_attention_heads", 16),
    "n_kv_heads": ("num_key_value_heads", 2),
    "d_head": ("head_dim", 256),
    "dropout": ("attention_dropout", 0.0),
}
_SIZES_OF_EXPERTS = {
    "n_experts": ("num_experts", 512),
    "top_k": ("num_experts_per_tok", 10),
    "d_expert": ("moe_intermediate_size", 512),
    "d_shared": ("shared_expert_intermediate_size", 512),
}
_FEWER_EXPERTS = {"n_experts": ("num_experts", 256), "top_k": ("num_experts_per_tok", 8)}
_PACKED = {".mlp.experts.gate_up_proj": ("gate_proj", "up_proj"), ".mlp.experts.down_proj": ("down_proj",)}
_OF_DENSE = ("intermediate_size", "norm_topk_prob", "mlp_only_layers")
_OF_IMAGES = """
text_config vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id language_model_only
"""
_DELTA = {
    "convolution": "conv1d",
    "A_log": "A_log",
    "dt_bias": "dt_bias",
    "norm": "norm",
    "output_projection": "out_proj",
}
_PROJECTIONS = {"qkv": "in_proj_qkv", "gate_projection": "in_proj_z"}
_PROJECTIONS |= {"rate_projection": "in_proj_b", "decay_projection": "in_proj_a"}


def _qwen3_next_config(settings: Settings, d_model: int, n_layer: int) -> dict[str, Any]:
    dense, step = set(settings.numbers("mlp_only_layers") or ()), settings.size("decoder_sparse_step", 1)
    n_experts = settings.size("num_experts", 512, least=0)
    sparse = [bool(n_experts) and number not in dense and (number + 1) % step == 0 for number in range(n_layer)]
    others = {own: entry for own, entry in _SIZES_OF_EXPERTS.items() if own != "n_experts"}
    experts = {"n_experts": n_experts, **_experts(settings, others)}
    experts["normalise"] = settings.flag("norm_topk_prob", True)
    shape = _qwen_config(settings, n_layer, settings.size("intermediate_size", 5632), _HEADS, settings.rotation(0.25))
    return {**shape, **networks_of([EXPERTS if one else "swiglu" for one in sparse], experts)}


def _experts(settings: Settings, sizes: Mapping[str, tuple[str, int]]) -> dict[str, Any]:
    settings.ignore("output_router_logits router_aux_loss_coef")
    return {**settings.options(sizes), "shared_gate": True}


def _qwen3_5_config(settings: Settings, d_model: int, n_layer: int) -> dict[str, Any]:
    heads = _HEADS | {"n_kv_heads": ("num_key_value_heads", 4)}
    return _qwen3_5_stack(settings, n_layer, settings.size("intermediate_size", 12288), heads)


def _qwen3_5_moe_config(settings: Settings, d_model: int, n_layer: int) -> dict[str, Any]:
    settings.only(norm_topk_prob=True)
    settings.ignore("intermediate_size decoder_sparse_step")  # of Qwen3-Next's dense networks, which it has not
    experts = _experts(settings, _SIZES_OF_EXPERTS | _FEWER_EXPERTS)
    return {**_qwen3_5_stack(settings, n_layer, experts["d_expert"], _HEADS), **networks_of([EXPERTS], experts)}


def _qwen3_5_stack(
    settings: Settings, n_layer: int, d_hidden: int, heads: Mapping[str, tuple[str, Any]]
) -> dict[str, Any]:
    settings.only(attn_output_gate=True, output_gate_type=("swish", "silu"))
    # further layers that predict tokens ahead, which transformers' class does not load
    settings.ignore("mamba_ssm_dtype mlp_only_layers mtp_num_hidden_layers mtp_use_dedicated_embeddings")
    # how the channels are shared between positions in time and in images, which are equal in a text
    rotation = settings.rotation(0.25, neutral="mrope_section mrope_interleaved")
    return _qwen_config(settings, n_layer, d_hidden, heads, rotation)


def of_qwen3_5(entries: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the language model's entries of a config.json called `name`, which may be of images and text."""
    if entries.get("model_type") not in ("qwen3_5", "qwen3_5_moe"):
        return dict(entries)
    text: Any = entries.get("text_config")
    require(isinstance(text, dict), f"text_config in {name}", text, "an object")
    settings = Settings(entries, name)
    settings.ignore(_OF_IMAGES)
    tied = settings.flag("tie_word_embeddings", False)
    settings.finish()
    return {"model_type": f"{entries['model_type']}_text", **text, "tie_word_embeddings": tied}


def _qwen_config(
    settings: Settings,
    n_layer: int,
    d_hidden: int,
    heads: Mapping[str, tuple[str, Any]],
    rotation: tuple[float, float],
) -> dict[str, Any]:
    interval = settings.size("full_attention_interval", 4)
    kinds = [list(_OF_QWEN)[(number + 1) % interval == 0] for number in range(n_layer)]
    mixers = settings.layers("layer_types", _OF_QWEN, kinds)
    settings.only(hidden_act=("silu", "swish"), attention_bias=False)
    settings.ignore("max_position_embeddings")
    epsilon, (base, share) = settings.number("rms_norm_eps", 1e-6), rotation
    n_qk_heads, n_heads = settings.size("linear_num_key_heads", 16), settings.size("linear_num_value_heads", 32)
    options: dict[str, dict[str, Any]] = {
        _LINEAR: {
            "n_heads": n_heads,
            "n_qk_heads": n_qk_heads,
            "d_qk": n_qk_heads * settings.size("linear_key_head_dim", 128),
            "d_v": n_heads * settings.size("linear_value_head_dim", 128),
            "kernel_size": settings.size("linear_conv_kernel_dim", 4),
            "norm_epsilon": epsilon,
        },
        _ATTENTION: {
            **settings.options(heads),
            "rotated_share": share,
            "rotation_base": base,
            "window": None,
            "norm_epsilon": epsilon,
        },
    }
    return shape_of(mixers, options, d_hidden, epsilon)


def _qwen3_next_rules(block: Block) -> list[Rule]:
    experts = block.experts(f"model.layers.{block.number}.mlp.experts.", SWIGLU)
    if block.mixer == _ATTENTION:
        return [*_qwen_attention_rules(block), *experts]
    (q, k, v, gate), (rate, decay) = (fused.names for fused in _qwen3_next_fused(block))
    split = {"gate_projection.weight": gate, "rate_projection.weight": rate, "decay_projection.weight": decay}
    return [
        *experts,
        block.stacked("qkv.weight", [q, k, v], _rows_of_delta(block)),
        *block.plain(split),
        *block.plain(_DELTA, f"model.layers.{block.number}.linear_attn."),
    ]


def _qwen3_5_rules(block: Block) -> list[Rule]:
    if block.mixer == _ATTENTION:
        return _qwen_attention_rules(block)
    return block.plain(_DELTA | _PROJECTIONS, f"model.layers.{block.number}.linear_attn.")


def _qwen3_5_moe_rules(block: Block) -> list[Rule]:
    return [*_qwen3_5_rules(block), *block.experts(f"model.layers.{block.number}.mlp.experts.", SWIGLU)]


def _qwen_attention_rules(block: Block) -> list[Rule]:
    theirs = f"model.layers.{block.number}.self_attn."
    ((q, gate),) = (fused.names for fused in _qwen3_5_fused(block))
    return [
        *block.attention(theirs, queries=q),
        *block.plain({"gate_projection.weight": gate}),
        *block.head_norms({"query_norm": "q_norm", "key_norm": "k_norm"}, theirs, less=1.0),
    ]


def _qwen3_5_fused(block: Block) -> list[Fused]:
    if block.mixer == _LINEAR:
        return []
    n_heads, _, d_head = block.heads
    return [Fused(f"model.layers.{block.number}.self_attn.q_proj.weight", ("q", "gate"), n_heads, (d_head, d_head))]


def _qwen3_next_fused(block: Block) -> list[Fused]:
    if block.mixer == _ATTENTION:
        return _qwen3_5_fused(block)
    theirs, sizes = f"model.layers.{block.number}.", _sizes_of_delta(block.d_model, block.options)
    n_groups = sizes["n_qk_heads"]
    d_k, d_v, shared_by = sizes["d_qk"] // n_groups, sizes["d_v"] // n_groups, sizes["n_heads"] // n_groups
    return [
        Fused(f"{theirs}linear_attn.in_proj_qkvz.weight", ("q", "k", "v", "z"), n_groups, (d_k, d_k, d_v, d_v)),
        Fused(f"{theirs}linear_attn.in_proj_ba.weight", ("b", "a"), n_groups, (shared_by, shared_by)),
    ]


def _sizes_of_delta(d_model: int, options: dict[str, Any]) -> dict[str, int]:
    """The sizes of a Gated DeltaNet, by its own defaults."""
    n_heads = options["n_heads"]
    d_qk = options["d_qk"] or n_heads * max(1, 3 * d_model // (4 * n_heads))
    n_qk_heads = options["n_qk_heads"] or n_heads
    return {"n_heads": n_heads, "n_qk_heads": n_qk_heads, "d_qk": d_qk, "d_v": options["d_v"] or 2 * d_qk}


def _rows_of_delta(block: Block) -> list[int]:
    """The numbers of rows of a Gated DeltaNet's q, k and v."""
    sizes = _sizes_of_delta(block.d_model, block.options)
    return [sizes["d_qk"], sizes["d_qk"], sizes["d_v"]]


def _entries_of_delta(stack: Stack) -> dict[str, Any]:
    """Return what config.json says of a stack's Gated DeltaNets."""
    options = stack.mixer(_LINEAR)
    sizes = _sizes_of_delta(stack.config.d_model, options)
    return {
        "linear_num_key_heads": sizes["n_qk_heads"],
        "linear_num_value_heads": sizes["n_heads"],
        "linear_key_head_dim": sizes["d_qk"] // sizes["n_qk_heads"],
        "linear_value_head_dim": sizes["d_v"] // sizes["n_heads"],
        "linear_conv_kernel_dim": options["kernel_size"],
    }


def _qwen3_next_settings(stack: Stack) -> dict[str, Any]:
    experts = stack.experts | {"d_shared": max(stack.experts["d_shared"], 1)}
    return {
        **_qwen_settings(stack),
        **written(experts, _SIZES_OF_EXPERTS),
        "norm_topk_prob": experts["normalise"],
        "mlp_only_layers": [number for number, name in enumerate(stack.config.feed_forwards) if name != EXPERTS],
    }


def _qwen3_5_moe_settings(stack: Stack) -> dict[str, Any]:
    return {key: entry for key, entry in _qwen3_next_settings(stack).items() if key not in _OF_DENSE}


def _qwen_settings(stack: Stack) -> dict[str, Any]:
    return {
        "intermediate_size": max(stack.config.d_channel_mixing, 1),
        "layer_types": stack.kinds(_OF_QWEN),
        **_entries_of_delta(stack),
        **stack.attention(_ATTENTION),
        **rotation_entries(stack.mixer(_ATTENTION)),
        "rms_norm_eps": stack.config.norm_epsilon,
    }


QWEN3_5 = Architecture(
    model_type="qwen3_5_text",
    mixer=_LINEAR,
    names=STACK,
    scales=NORMS | {"norm": "model.norm"},
    config=_qwen3_5_config,
    settings=_qwen_settings,
    rules=_qwen3_5_rules,
    fused=_qwen3_5_fused,
    fits=lambda stack: not stack.has_experts,
    other_tensors={"model.language_model.": "model.", "model.visual.": None, "mtp.": None},
)
QWEN3_NEXT = QWEN3_5._replace(
    model_type="qwen3_next",
    names={
        **QWEN3_5.names,
        **{f"blocks.#.feed_forward.shared.{own}": f"model.layers.#.mlp.shared_expert.{x}" for own, x in SWIGLU.items()},
        "blocks.#.feed_forward.shared_gate": "model.layers.#.mlp.shared_expert_gate",
        "blocks.#.feed_forward.router": "model.layers.#.mlp.gate",
    },
    config=_qwen3_next_config,
    settings=_qwen3_next_settings,
    rules=_qwen3_next_rules,
    fused=_qwen3_next_fused,
    fits=lambda stack: True,
    other_tensors={"mtp.": None},
    other_layout=lambda weights: unpacked_experts(weights, _PACKED),
)
QWEN3_5_MOE = QWEN3_NEXT._replace(
    model_type="qwen3_5_moe_text",
    config=_qwen3_5_moe_config,
    settings=_qwen3_5_moe_settings,
    rules=_qwen3_5_moe_rules,
    fused=_qwen3_5_fused,
    fits=lambda stack: set(stack.config.feed_forwards) == {EXPERTS} and stack.experts["normalise"],
    other_tensors=QWEN3_5.other_tensors,
)


# --- OLMo Hybrid (allenai/Olmo-Hybrid-7B) ---

_ROTARY = "rotary-attention"
_OF_OLMO = {"linear_attention": _LINEAR, "full_attention": _ROTARY}
_OF_OLMOS_DELTA = _DELTA | {"gate_projection": "g_proj", "rate_projection": "b_proj", "decay_projection": "a_proj"}
_OF_OLMOS_DELTA |= {"norm": "o_norm", "output_projection": "o_proj"}
_OLMO_NORMS = {
    _LINEAR: {"norm_mixing": "input_layernorm", "norm_feed_forward": "post_attention_layernorm"},
    _ROTARY: {"norm_mixing": "post_attention_layernorm", "norm_feed_forward": "post_feedforward_layernorm"},
}
_OF_NEW_OLMOS = "linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min"


def _olmo_config(settings: Settings, d_model: int, n_layer: int) -> dict[str, Any]:
    kinds = [list(_OF_OLMO)[number % 4 == 3] for number in range(n_layer)]
    kinds = kinds if n_layer > 3 else [*kinds[:-1], "full_attention"]
    mixers = settings.layers("layer_types", _OF_OLMO, kinds)
    settings.only(hidden_act=("silu", "swish"), attention_bias=False)
    settings.ignore(f"max_position_embeddings {_OF_NEW_OLMOS}")
    rotates, base = settings.rotates(), settings.whole_rotation()
    epsilon, n_heads = settings.number("rms_norm_eps", 1e-6), settings.size("num_attention_heads", 30)
    n_qk_heads, n_value_heads = (settings.optional_size(f"linear_num_{x}_heads") or n_heads for x in ("key", "value"))
    d_key = settings.optional_size("linear_key_head_dim") or int(0.75 * d_model / n_qk_heads)
    options: dict[str, dict[str, Any]] = {
        _LINEAR: {
            "n_heads": n_value_heads,
            "n_qk_heads": n_qk_heads,
            "d_qk": n_qk_heads * d_key,
            "d_v": n_value_heads * (settings.optional_size("linear_value_head_dim") or 2 * d_key),
            "kernel_size": settings.size("linear_conv_kernel_dim", 4),
            "negative_eigenvalues": settings.flag("linear_allow_neg_eigval", True),
        },
        _ROTARY: {
            "n_heads": n_heads,
            "n_kv_heads": settings.optional_size("num_key_value_heads") or n_heads,
            "d_head": d_model // n_heads,
            "rotated_share": float(rotates),
            "rotation_base": base,
            "window": None,
            "dropout": settings.number("attention_dropout", 0.0),
            "qk_norm": epsilon,
            "qk_norm_over": "all",
        },
    }
    shape = shape_of(mixers, options, settings.size("intermediate_size", 11008), epsilon)
    return shape | {"norm_place": ["after" if name == _ROTARY else "before" for name in mixers]}


def _olmo_rules(block: Block) -> list[Rule]:
    layer = f"model.layers.{block.number}."
    norms = plain_rules(_OLMO_NORMS[block.mixer], f"blocks.{block.number}.", layer)
    if block.mixer == _ROTARY:
        theirs = f"{layer}self_attn."
        heads = block.head_norms({"query_norm": "q_norm", "key_norm": "k_norm"}, theirs)
        return [*norms, *block.attention(theirs), *heads]
    theirs = f"{layer}linear_attn."
    qkv = block.stacked("qkv.weight", [f"{theirs}{part}_proj.weight" for part in "qkv"], _rows_of_delta(block))
    return [*norms, qkv, *block.plain(_OF_OLMOS_DELTA, theirs)]


def _joined_convolutions(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Make one tensor of a layer's convolutions of q, k and v: of three equal parts, if transformers has saved it."""
    for first in [name for name in weights if name.endswith(".q_conv1d.weight")]:
        names = [first.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        if all(name in weights for name in names):
            shapes = [tuple(weights[name].shape) for name in names]
            fits = all(len(shape) == 3 and shape[1:] == shapes[0][1:] for shape in shapes)
            require(fits, f"the shapes of {', '.join(names)}", shapes, "(channels, 1, kernel) each, with one kernel")
            weights[first.replace("q_conv1d", "conv1d")] = torch.cat([weights.pop(name) for name in names])
    return weights


def _usual_olmo(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """As published, two norms have other names than in the class."""
    for old, new in (
        ("attention_layer_norm", "input_layernorm"),
        ("feedforward_layer_norm", "post_attention_layernorm"),
    ):
        weights = {name.replace(f".{old}.", f".{new}."): tensor for name, tensor in weights.items()}
    return _joined_convolutions(weights)


def _olmo_settings(stack: Stack) -> dict[str, Any]:
    attention, (n_heads, n_kv_heads, _) = stack.mixer(_ROTARY), stack.heads(_ROTARY)
    base = attention["rotation_base"] if attention["rotated_share"] else None
    return {
        "intermediate_size": max(stack.config.d_channel_mixing, 1),
        "layer_types": stack.kinds(_OF_OLMO),
        **_entries_of_delta(stack),
        "linear_allow_neg_eigval": stack.mixer(_LINEAR)["negative_eigenvalues"],
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "attention_dropout": attention["dropout"],
        "rope_parameters": {"rope_type": "default", "rope_theta": base},
        "rms_norm_eps": stack.config.norm_epsilon,
        "pad_token_id": None,  # by default one that a small vocabulary does not have, which the class refuses
    }


OLMO_HYBRID = Architecture(
    model_type="olmo_hybrid",
    mixer=_LINEAR,
    names=STACK,
    config=_olmo_config,
    settings=_olmo_settings,
    rules=_olmo_rules,
    fits=lambda stack: _ROTARY in stack.mixers,
    other_layout=_usual_olmo,
)
