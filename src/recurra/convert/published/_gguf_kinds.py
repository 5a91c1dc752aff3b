"""llama.cpp's architectures: their metadata as config.json, and their tensors; Mamba, Falcon Mamba, Mamba-2, Jamba.

Metadata and tensors are those that llama.cpp's own converter writes. It stores A = -exp(A_log), and folds constants
that transformers adds or multiplies by into the weights.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recurra.checks import require
from recurra.convert.published._mambas import regular_places
from recurra.convert.published._rules import Rule
from recurra.convert.published._settings import Settings

Entries = dict[str, Any]
INNER, KV_HEADS = "ssm.inner_size", "attention.head_count_kv"
_MOST_CONTEXT = 2**18
"""Context length written to files: llama.cpp requires a number."""


class Kind(NamedTuple):
    """An architecture of llama.cpp."""

    name: str
    """In general.architecture."""
    model_type: str
    """transformers' name of it."""
    sizes: Mapping[str, str]
    """Entries of config.json that are whole numbers, by keys of the metadata, without the architecture before them."""
    epsilon: tuple[str, str]
    """The key and the entry of the norms' epsilon."""
    read: Callable[[Settings, Entries], Entries]
    """Makes the other entries, from the metadata and the entries so far."""
    write: Callable[[Entries], dict[str, Any]]
    """Makes the other metadata, or refuses what llama.cpp does not support."""
    rules: Callable[[Entries], list[Rule]]
    """Tensors whose layout differs: transformers' names (`own`), and names that the package gguf knows (`theirs`)."""
    has: Callable[[set[str]], Entries] = lambda names: {}
    """Entries that follow only from the names of the tensors in a file."""

    def entries(self, settings: Settings, names: set[str], vocab_size: int) -> Entries:
        """Return the entries of config.json, from a file's metadata and the names of its tensors."""
        entries: Entries = {"model_type": self.model_type, "vocab_size": vocab_size}
        entries |= {entry: settings.size(key) for key, entry in self.sizes.items()}
        n_ahead = settings.size("nextn_predict_layers", 0, least=0, most=entries["num_hidden_layers"] - 1)
        entries["num_hidden_layers"] -= n_ahead  # the last layers, for multi-token prediction
        key, entry = self.epsilon
        entries[entry] = number(settings, key)
        entries["tie_word_embeddings"] = "output.weight" not in names
        return entries | self.has(names) | self.read(settings, entries)

    def metadata(self, entries: Entries) -> dict[str, Any]:
        """Return the metadata for entries of config.json."""
        key, entry = self.epsilon
        sizes = {key: entries[entry] for key, entry in self.sizes.items()}
        return {"context_length": _MOST_CONTEXT, **sizes, key: float(entries[entry]), **self.write(entries)}


def number(settings: Settings, key: str, default: float | None = None) -> float:
    """Read a float32 as its shortest decimal: 1e-05 in float32, cast to float64, is not 1e-05."""
    return float(str(np.float32(settings.number(key, default))))


# --- tensors ---


def decay(tensor: Tensor) -> Tensor:
    return -torch.exp(tensor.double()).float()


def log_of_decay(tensor: Tensor) -> Tensor:
    return torch.log(-tensor.double()).float()


def rule(own: str, name: str, to: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Rule:
    """Rule for a tensor with another layout; `name` replaces the last part of its transformers name."""
    return Rule(rf"(?P<front>.*\.){own}", (rf"\g<front>{name}",), back, lambda tensor: (to(tensor),))


_CONVOLUTION = rule(r"conv1d\.weight", "conv1d.weight", lambda t: t.squeeze(1), lambda t: t.unsqueeze(1))
_BIAS_OF_STEPS = rule("dt_bias", "dt_proj.bias", lambda t: t, lambda t: t)
_OF_MAMBA = [rule("A_log", "A_log", decay, log_of_decay), _CONVOLUTION]


def rules_of_mamba2(entries: Entries) -> list[Rule]:
    """A and D are columns, and the norm's weight has one row per group."""
    n_groups: int = entries.get("n_groups") or entries["mamba_n_groups"]
    return [
        rule("A_log", "A_log", lambda t: decay(t)[:, None], lambda t: log_of_decay(t[:, 0])),
        rule("D", "D", lambda t: t[:, None], lambda t: t[:, 0]),
        rule(r"(?P<kind>mixer|mamba)\.norm\.weight", r"\g<kind>.norm.weight", *_as_rows(n_groups)),
        _BIAS_OF_STEPS,
        _CONVOLUTION,
    ]


def _as_rows(n: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    return lambda t: t.view(n, -1), lambda t: t.reshape(-1)


# --- Mamba, Falcon Mamba, Mamba-2, Jamba ---

SHARED = {"embedding_length": "hidden_size", "block_count": "num_hidden_layers"}
_SELECTIVE = {"ssm.conv_kernel": "conv_kernel", "ssm.state_size": "state_size", "ssm.time_step_rank": "time_step_rank"}
NORM = "attention.layer_norm_rms_epsilon"
HEADS = {"attention.head_count": "num_attention_heads"}
_UNUSED = {"feed_forward_length": 0, "attention.head_count": 0}
"""What llama.cpp wants of models without attention, and does not use."""


def take_expand(settings: Settings, entries: Entries) -> int:
    d_model, inner = entries["hidden_size"], settings.size(INNER)
    require(inner % d_model == 0, INNER, inner, f"a multiple of embedding_length = {d_model}")
    return inner // d_model


def _read_mamba(settings: Settings, entries: Entries) -> Entries:
    found: Entries = {"expand": take_expand(settings, entries)}
    if settings.flag("ssm.dt_b_c_rms", False):
        found |= {"model_type": "falcon_mamba", "mixer_rms_eps": entries["layer_norm_epsilon"]}
    return found


def _write_mamba(entries: Entries) -> dict[str, Any]:
    expand, epsilon = entries["expand"], entries["layer_norm_epsilon"]
    require(expand == 2, "expand", expand, "2, all that llama.cpp reads")
    metadata = {INNER: 2 * entries["hidden_size"], **_UNUSED}
    if "mixer_rms_eps" in entries:
        expected = f"norm_epsilon = {epsilon}, as llama.cpp has one number for both"
        require(entries["mixer_rms_eps"] == epsilon, "selection_norm", entries["mixer_rms_eps"], expected)
        metadata["ssm.dt_b_c_rms"] = True
    return metadata


def _read_mamba2(settings: Settings, entries: Entries) -> Entries:
    expand = take_expand(settings, entries)
    return {"expand": expand, "head_dim": expand * entries["hidden_size"] // entries["num_heads"]}


def size_of_head(entries: Entries) -> int:
    """Return the default channels per head, d_model / n_heads."""
    d_model, n_heads = entries["hidden_size"], entries["num_attention_heads"]
    require(d_model % n_heads == 0, "attention.head_count", n_heads, f"a divisor of embedding_length = {d_model}")
    return int(d_model // n_heads)


def require_usual_head(entries: Entries) -> int:
    """Return the head size; raise if it is not the one that llama.cpp assumes, d_model / n_heads."""
    usual, d_head = size_of_head(entries), entries["head_dim"]
    require(d_head == usual, "d_head", d_head, f"d_model / n_heads = {usual}, as in llama.cpp")
    return usual


def take_attention(settings: Settings, entries: Entries) -> tuple[list[bool], int | None]:
    """Read which layers are attention layers, and their number of key and value heads."""
    heads, n_layer = settings.numbers(KV_HEADS) or [], entries["num_hidden_layers"]
    require(len(heads) == n_layer, KV_HEADS, heads, f"a number for each of {n_layer} layers")
    return [n_heads > 0 for n_heads in heads], max(heads) or None


def _read_jamba(settings: Settings, entries: Entries) -> Entries:
    attends, n_kv_heads = take_attention(settings, entries)
    period, offset = regular_places(attends, KV_HEADS, attends, "attention")
    settings.only(expert_count=(0, 1))
    places = {"attn_layer_period": period, "attn_layer_offset": offset}
    expand = {"mamba_expand": take_expand(settings, entries)}
    return {**expand, **places, "num_key_value_heads": n_kv_heads, "num_experts": 1}


def _write_jamba(entries: Entries) -> dict[str, Any]:
    expand, n_experts = entries["mamba_expand"], entries["num_experts"]
    require(expand == 2, "expand", expand, "2, all that llama.cpp reads")
    require(n_experts == 1, "n_experts", n_experts, "no mixtures of experts, which are not written as GGUF")
    period, offset = entries["attn_layer_period"], entries["attn_layer_offset"]
    attends = [number % period == offset for number in range(entries["num_hidden_layers"])]
    return {INNER: 2 * entries["hidden_size"], KV_HEADS: kv_heads(entries, attends)}


def kv_heads(entries: Entries, attends: list[bool]) -> list[int]:
    require(any(attends), "mixer", "one without attention", "attention in a block, without which llama.cpp fails")
    return [entries["num_key_value_heads"] * here for here in attends]


_OF_JAMBA = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.time_step_rank": "mamba_dt_rank",
    "feed_forward_length": "intermediate_size",
}
_MAMBA = Kind(
    "mamba",
    "mamba",
    SHARED | _SELECTIVE,
    (NORM, "layer_norm_epsilon"),
    _read_mamba,
    _write_mamba,
    lambda entries: _OF_MAMBA,
)
MAMBAS = [
    _MAMBA._replace(model_type="falcon_mamba"),  # its files also have the architecture mamba
    _MAMBA,
    Kind(
        "mamba2",
        "mamba2",
        SHARED | _SELECTIVE | {"ssm.time_step_rank": "num_heads", "ssm.group_count": "n_groups"},
        (NORM, "layer_norm_epsilon"),
        _read_mamba2,
        lambda entries: {INNER: entries["expand"] * entries["hidden_size"], **_UNUSED},
        rules_of_mamba2,
    ),
    Kind(
        "jamba",
        "jamba",
        SHARED | HEADS | _OF_JAMBA,
        (NORM, "rms_norm_eps"),
        _read_jamba,
        _write_jamba,
        lambda entries: _OF_MAMBA,
    ),
]
