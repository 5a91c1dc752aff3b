"""GGUF files of hybrids and of RWKV-7: Granite 4.0, Falcon-H1, LFM2, Qwen3.5."""

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recurra.checks import require
from recurra.convert.published._gguf_kinds import (
    HEADS,
    INNER,
    KV_HEADS,
    MAMBAS,
    NORM,
    SHARED,
    Entries,
    Kind,
    decay,
    kv_heads,
    log_of_decay,
    number,
    require_usual_head,
    rule,
    rules_of_mamba2,
    size_of_head,
    take_attention,
    take_expand,
)
from recurra.convert.published._recurrent import LOW_RANK, OF_THE_AUTHORS, RANKS
from recurra.convert.published._rules import Block, Rule, plain_rules
from recurra.convert.published._settings import Settings
from recurra.mixers.rwkv7 import usual_heads, usual_ranks

_BLOCK = r"model\.layers\.(?P<block>\d+)\."


def _split(own: str, *names: str) -> Rule:
    """Rule for a weight that transformers stacks along its rows and llama.cpp splits into `names`."""
    theirs = tuple(rf"blk.\g<block>.{name}" for name in names)
    return Rule(rf"{_BLOCK}{own}", theirs, lambda *t: torch.cat(t, -2), lambda t: t.chunk(2, -2))


def _renamed(own: str, name: str) -> Rule:
    """Rule for a block's tensor whose transformers name the package gguf does not map."""
    return Rule(rf"{_BLOCK}{own}", (rf"blk.\g<block>.{name}",))


_OF_MAMBA2 = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
_GRANITE_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def _rotation(settings: Settings, d_head: int, least: int | None = None) -> Entries:
    """Read rotary positions, which rotate `least` or more channels per head (None: all); refuse scaled positions."""
    settings.only(**{"rope.scaling.type": "none", "rope.scaling.factor": (1.0, 0.0), "rope.scale_linear": (1.0, 0.0)})
    n_turned = settings.size("rope.dimension_count", d_head, least=d_head if least is None else least, most=d_head)
    share = n_turned / d_head
    share = share if int(d_head * share) == n_turned else math.nextafter(share, 1)
    base = number(settings, "rope.freq_base", 10000.0)
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": share}}


def _base(entries: Entries) -> float:
    return float(entries["rope_parameters"]["rope_theta"])


def _read_granite(settings: Settings, entries: Entries) -> Entries:
    attends, n_kv_heads = take_attention(settings, entries)
    n_experts = settings.size("expert_count", 0, least=0)
    d_head, rotates = size_of_head(entries), settings.flag("rope.scaling.finetuned", False)
    network = {"num_local_experts": n_experts, "shared_intermediate_size": settings.size("feed_forward_length")}
    if n_experts:
        network["intermediate_size"] = network["shared_intermediate_size"]
        network["shared_intermediate_size"] = settings.size("expert_shared_feed_forward_length")
        network["num_experts_per_tok"] = settings.size("expert_used_count")
    attention_scale = number(settings, "attention.scale", 0.0)
    scales = {entry: number(settings, key, 0.0) or 1.0 for key, entry in _GRANITE_SCALES.items()}
    scales["attention_multiplier"] = attention_scale or d_head**-0.5
    return {
        **network,
        **scales,
        **(_rotation(settings, d_head) if rotates else {}),
        "mamba_expand": take_expand(settings, entries),
        "num_key_value_heads": n_kv_heads,
        "layer_types": ["attention" if here else "mamba" for here in attends],
        "position_embedding_type": "rope" if rotates else None,
    }


def _write_granite(entries: Entries) -> dict[str, Any]:
    expand, n_experts = entries["mamba_expand"], entries["num_local_experts"]
    attends = [kind in ("attention", "full_attention") for kind in entries["layer_types"]]
    require(expand == 2, "expand", expand, "2, all that llama.cpp reads")
    usual = require_usual_head(entries)
    network: dict[str, Any] = {"feed_forward_length": entries["shared_intermediate_size"]}
    if n_experts:
        network = {
            "feed_forward_length": entries["intermediate_size"],
            "expert_shared_feed_forward_length": entries["shared_intermediate_size"],
            "expert_count": n_experts,
            "expert_used_count": entries["num_experts_per_tok"],
        }
    return {
        **network,
        **{key: float(entries[entry]) for key, entry in _GRANITE_SCALES.items()},
        INNER: 2 * entries["hidden_size"],
        KV_HEADS: kv_heads(entries, attends),
        "rope.scaling.finetuned": entries["position_embedding_type"] == "rope",
        "rope.freq_base": _base(entries),
        "rope.dimension_count": usual,
        "vocab_size": entries["vocab_size"],
    }


def _rules_of_granite(entries: Entries) -> list[Rule]:
    shared = "shexp" if entries["num_local_experts"] else ""
    gate, up, down = (f"ffn_{part}_{shared}".rstrip("_") + ".weight" for part in ("gate", "up", "down"))
    heads = {"q": entries["num_attention_heads"], "k": entries["num_key_value_heads"] or 1}
    parts = {f"self_attn.{name}_proj.weight": _pairs(n_heads) for name, n_heads in heads.items()}
    return [
        *rules_of_mamba2(entries),
        *(rule(re.escape(name), name, *turned) for name, turned in parts.items()),
        _split(r"shared_mlp\.input_linear\.weight", gate, up),
        _renamed(r"shared_mlp\.output_linear\.weight", down),
        _split(r"block_sparse_moe\.input_linear\.weight", "ffn_gate_exps.weight", "ffn_up_exps.weight"),
        _renamed(r"block_sparse_moe\.output_linear\.weight", "ffn_down_exps.weight"),
        _renamed(r"block_sparse_moe\.router\.layer\.weight", "ffn_gate_inp.weight"),
    ]


def _pairs(n_heads: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Convert rotary channels from halves to interleaved pairs, which llama.cpp uses in some models, and back."""

    def to(tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).flatten(0, 2)

    def back(tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    return to, back


def _read_falcon_h1(settings: Settings, entries: Entries) -> Entries:
    return {**_rotation(settings, entries["head_dim"]), "mamba_norm_before_gate": False}


def _write_falcon_h1(entries: Entries) -> dict[str, Any]:
    is_first = entries["mamba_rms_norm"] and entries["mamba_norm_before_gate"]
    require(not is_first, "norm", "before", "None or 'after', which llama.cpp has")
    return {
        "attention.value_length": entries["head_dim"],
        "rope.freq_base": _base(entries),
        "vocab_size": entries["vocab_size"],
    }


def _rules_of_falcon_h1(entries: Entries) -> list[Rule]:
    """The multipliers of embeddings and logits are products with these."""
    first, last = (entries.get(f"{name}_multiplier", 1.0) for name in ("embedding", "lm_head"))
    tied = entries["tie_word_embeddings"] and first != last
    ends = ("token_embd.weight", "output.weight") if tied else ("token_embd.weight",)
    return [
        *rules_of_mamba2(entries),
        Rule(r"model\.embed_tokens\.weight", ends, write=lambda t: (t * first, t * last)[: len(ends)]),
        Rule(r"lm_head\.weight", ("output.weight",), write=lambda t: (t * last,)),
    ]


def _read_lfm2(settings: Settings, entries: Entries) -> Entries:
    attends, n_kv_heads = take_attention(settings, entries)
    settings.only(**{"attention.sliding_window": 0})
    return {
        **_rotation(settings, size_of_head(entries)),
        "layer_types": ["full_attention" if here else "conv" for here in attends],
        "num_key_value_heads": n_kv_heads,
        "block_auto_adjust_ff_dim": False,
    }


def _write_lfm2(entries: Entries) -> dict[str, Any]:
    require(not entries["conv_bias"], "biases", True, "none, as in llama.cpp")
    require_usual_head(entries)
    return {
        KV_HEADS: kv_heads(entries, [kind == "full_attention" for kind in entries["layer_types"]]),
        "rope.freq_base": _base(entries),
        "vocab_size": entries["vocab_size"],
    }


_CONV = rule(r"conv\.conv\.weight", "conv.conv.weight", lambda t: t.squeeze(1), lambda t: t.unsqueeze(1))


def _read_qwen3_5(settings: Settings, entries: Entries) -> Entries:
    n_heads = entries["linear_num_value_heads"]
    return {
        **_rotation(settings, entries["head_dim"], 1),
        "linear_value_head_dim": settings.size(INNER) // n_heads,
        "full_attention_interval": settings.size("full_attention_interval", 4),
    }


def _write_qwen3_5(entries: Entries) -> dict[str, Any]:
    attends = [kind == "full_attention" for kind in entries["layer_types"]]
    epsilon = entries["rms_norm_eps"]
    require(
        epsilon == 1e-6, "norm_epsilon", epsilon, "1e-06, which llama.cpp also adds where it scales keys to length 1"
    )
    d_key, d_value = entries["linear_key_head_dim"], entries["linear_value_head_dim"]
    require(d_key == d_value, "d_v / n_heads", d_value, f"d_qk / n_qk_heads = {d_key}, as in llama.cpp")
    n_layer = len(attends)
    intervals = (n for n in range(1, n_layer + 2) if attends == [(at + 1) % n == 0 for at in range(n_layer)])
    interval = next(intervals, 0)
    is_regular = interval > 0 and any(attends)
    require(is_regular, "mixer", entries["layer_types"], "attention in every n-th block, as llama.cpp has it")
    n_turned = int(entries["head_dim"] * entries["rope_parameters"]["partial_rotary_factor"])
    require(n_turned > 0, "rotated_share", 0.0, "more than 0, as in llama.cpp")
    return {
        INNER: entries["linear_value_head_dim"] * entries["linear_num_value_heads"],
        "attention.value_length": entries["head_dim"],
        "full_attention_interval": interval,
        "rope.freq_base": _base(entries),
        "rope.dimension_count": n_turned,
        # M-RoPE: angles for time, height and width, a third each; all three positions are equal in text
        "rope.dimension_sections": [(n_turned // 2 + 2 - axis) // 3 for axis in range(3)] + [0],
    }


def _rules_of_qwen3_5(entries: Entries) -> list[Rule]:
    """Norm weights include the 1 that transformers adds, and value heads that share keys are not adjacent."""
    n_groups, d_v = entries["linear_num_key_heads"], entries["linear_value_head_dim"]
    shared_by, d_keys = entries["linear_num_value_heads"] // n_groups, 2 * n_groups * entries["linear_key_head_dim"]

    def apart(tensor: Tensor, size: int = 1, n: tuple[int, int] = (n_groups, shared_by)) -> Tensor:
        return tensor.unflatten(0, (*n, size)).transpose(0, 1).flatten(0, 2)

    def together(tensor: Tensor, size: int = 1) -> Tensor:
        return apart(tensor, size, (shared_by, n_groups))

    def of_values(change: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda t: torch.cat([t[:d_keys], change(t[d_keys:], d_v)])

    changes: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
        "A_log": (lambda t: apart(decay(t)), lambda t: log_of_decay(together(t))),
        "dt_bias": (apart, together),
        "conv1d.weight": (lambda t: of_values(apart)(t[:, 0]), lambda t: of_values(together)(t)[:, None]),
        "in_proj_qkv.weight": (of_values(apart), of_values(together)),
        "in_proj_z.weight": (lambda t: apart(t, d_v), lambda t: together(t, d_v)),
        "in_proj_a.weight": (apart, together),
        "in_proj_b.weight": (apart, together),
        "out_proj.weight": (lambda t: apart(t.t(), d_v).t(), lambda t: together(t.t(), d_v).t()),
    }
    return [
        *(
            rule(rf"linear_attn\.{re.escape(name)}", f"linear_attn.{name.replace('dt_bias', 'dt_proj.bias')}", *change)
            for name, change in changes.items()
        ),
        Rule(r"(.*linear_attn\.norm\.weight)", (r"\1",)),
        Rule(r"(.*norm\.weight)", (r"\1",), lambda t: t - 1, lambda t: (t + 1,)),
    ]


# --- RWKV-7 ---

_OF_TIME = {
    "shift": "lerp_fused.weight",
    "decay_bias": "w0.weight",
    "rate_projection.2.bias": "a0.weight",
    "value_projection.2.bias": "v0.weight",
    "removal_scale": "k_k.weight",
    "rate_share": "k_a.weight",
    "bonus": "r_k.weight",
    "receptance": "receptance",
    "key": "key",
    "value": "value",
    "output_projection": "output",
    "norm_weight": "ln.weight",
    "norm_bias": "ln.bias",
}
_OF_CHANNELS = {"shift": "lerp_k.weight", "key": "key", "output_projection": "value"}


def _rules_of_rwkv7(block: Block) -> list[Rule]:
    layer, half = divmod(block.number, 2)
    theirs = f"blk.{layer}.{('time', 'channel')[half]}_mix_"
    norm = plain_rules({f"blocks.{block.number}.norm_mixing": f"blk.{layer}.attn_norm{('', '_2')[half]}"})
    if half:
        return [*norm, *block.plain(_OF_CHANNELS, theirs)]
    names = _OF_TIME | {
        f"{own}_projection.{place}.weight": f"{letter}{place // 2 + 1}.weight"
        for own, letter in LOW_RANK.items()
        for place in (0, 2)
    }
    twice = (
        [] if layer else [_dummy(key, names.pop(key), block.own, theirs) for key in list(names) if "rate_proj" in key]
    )
    own, d_model = {key: name for key, name in names.items() if key not in ("shift", "bonus")}, block.d_model
    heads = block.options["n_heads"] or usual_heads(d_model)
    return [
        *norm,
        *twice,
        *block.plain({"shift": names["shift"]}, theirs, *_shaped((6, 1, 1, d_model), (6, d_model))),
        *block.plain({"bonus": names["bonus"]}, theirs, *_shaped((d_model,), (heads, d_model // heads))),
        *block.plain(own, theirs),
    ]


def _ranks_of_rwkv7(entries: Entries) -> dict[str, tuple[str, int]]:
    """Map metadata keys of the LoRA ranks to entries of config.json and their values."""
    usual = usual_ranks(entries["hidden_size"], entries["head_dim"])
    names = zip(("decay", "iclr", "value_residual_mix", "gate"), RANKS.items(), strict=True)
    return {f"attention.{key}_lora_rank": (entry, entries.get(entry) or usual[own]) for key, (own, entry) in names}


def _write_rwkv7(entries: Entries) -> dict[str, Any]:
    d_head = entries["head_dim"]
    require(d_head % 32 == 0, "d_model / n_heads", d_head, "a multiple of 32: llama.cpp computes others wrongly")
    require(not entries["tie_word_embeddings"], "tie_embeddings", True, "False, as in llama.cpp")
    return {"attention.head_count": 0} | {key: rank for key, (_, rank) in _ranks_of_rwkv7(entries).items()}


def _dummy(key: str, name: str, own: str, theirs: str) -> Rule:
    """Rule that writes a first-block tensor twice: llama.cpp also expects value-residual weights, which it lacks."""
    names = (theirs + name, theirs + name.replace("a", "v", 1))
    return Rule(re.escape(own + key), names, lambda rate, _: rate, lambda rate: (rate, rate))


def _shaped(
    theirs: tuple[int, ...], own: tuple[int, ...]
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], tuple[Tensor, ...]]]:
    return lambda tensor: tensor.view(own), lambda tensor: (tensor.view(theirs),)


RWKV7 = OF_THE_AUTHORS._replace(
    names={"embedding": "token_embd", "embedding_norm": "token_embd_norm", "norm": "output_norm", "head": "output"},
    rules=_rules_of_rwkv7,
    head="output.weight",
)
"""RWKV-7 by llama.cpp's own names."""


# --- all ---

_LAYER_NORM = "attention.layer_norm_epsilon"
_OF_RWKV7 = {"wkv.head_size": "head_dim", "feed_forward_length": "intermediate_size"}
_OF_LFM2 = {"shortconv.l_cache": "conv_L_cache", "feed_forward_length": "intermediate_size"}
_OF_FALCON_H1 = {
    INNER: "mamba_d_ssm",
    "feed_forward_length": "intermediate_size",
    KV_HEADS: "num_key_value_heads",
    "attention.key_length": "head_dim",
}
_OF_QWEN3_5 = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "feed_forward_length": "intermediate_size",
    KV_HEADS: "num_key_value_heads",
    "attention.key_length": "head_dim",
}
KINDS = [
    *MAMBAS,
    Kind(
        "granitehybrid",
        "granitemoehybrid",
        SHARED | HEADS | _OF_MAMBA2,
        (NORM, "rms_norm_eps"),
        _read_granite,
        _write_granite,
        _rules_of_granite,
    ),
    Kind(
        "falcon-h1",
        "falcon_h1",
        SHARED | HEADS | _OF_MAMBA2 | _OF_FALCON_H1,
        (NORM, "rms_norm_eps"),
        _read_falcon_h1,
        _write_falcon_h1,
        _rules_of_falcon_h1,
        lambda names: {"mamba_rms_norm": "blk.0.ssm_norm.weight" in names},
    ),
    Kind(
        "lfm2",
        "lfm2",
        SHARED | HEADS | _OF_LFM2,
        (NORM, "norm_eps"),
        _read_lfm2,
        _write_lfm2,
        lambda entries: [_CONV],
    ),
    Kind(
        "qwen35",
        "qwen3_5_text",
        SHARED | HEADS | _OF_QWEN3_5,
        (NORM, "rms_norm_eps"),
        _read_qwen3_5,
        _write_qwen3_5,
        _rules_of_qwen3_5,
    ),
    Kind(
        "rwkv7",
        "rwkv7",
        SHARED | _OF_RWKV7,
        (_LAYER_NORM, "norm_eps"),
        lambda settings, entries: {entry: settings.size(key) for key, (entry, _) in _ranks_of_rwkv7(entries).items()},
        _write_rwkv7,
        lambda entries: [],
    ),
]
"""Those that can be read and written."""
