"""GGUF files, which llama.cpp reads: Mamba, Falcon Mamba, Mamba-2 and Jamba with dense feed-forward networks alone.

Weights go by way of transformers' layout. llama.cpp's names for them are those of the package `gguf`; it keeps A, which
is -exp(A_log), and drops or adds dimensions of 1. Needs the extra `hf`.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, Keys
from torch import Tensor

from recurra._choices import GgufType
from recurra._files.reading import one_line
from recurra._files.weights import require_finite
from recurra._files.writing import replacing
from recurra.checks import choose, require, require_literal, sentence
from recurra.convert.portable import PortableModel
from recurra.convert.published._gguf_tokenizer import read_tokenizer, write_tokenizer
from recurra.convert.published._rules import listed, regular_places, rules_of, weights_by_their_names
from recurra.convert.published._settings import Settings
from recurra.convert.published.folder import ARCHITECTURES, filled, outline_of, published_form

_KINDS = {"mamba": "mamba", "falcon_mamba": "mamba", "mamba2": "mamba2", "jamba": "jamba"}
"""llama.cpp's architecture by transformers' model_type."""
_INNER, _NORM = "ssm.inner_size", "attention.layer_norm_rms_epsilon"
_SHARED = {"embedding_length": "hidden_size", "block_count": "num_hidden_layers"}
_OF_MAMBA = _SHARED | {
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "state_size",
    _INNER: "expand",
    _NORM: "layer_norm_epsilon",
}
_ENTRIES = {
    "mamba": _OF_MAMBA | {"ssm.time_step_rank": "time_step_rank"},
    "mamba2": _OF_MAMBA | {"ssm.time_step_rank": "num_heads", "ssm.group_count": "n_groups"},
    "jamba": _SHARED
    | {
        "ssm.conv_kernel": "mamba_d_conv",
        "ssm.state_size": "mamba_d_state",
        _INNER: "mamba_expand",
        _NORM: "rms_norm_eps",
        "ssm.time_step_rank": "mamba_dt_rank",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
    },
}
"""Entries of config.json by keys of the metadata, without the architecture in front of them."""
_MOST_CONTEXT = 2**18
"""What files give as the longest context, for which llama.cpp wants a number."""
_WHOLE = "the weights of a whole model"


# --- reading ---


class _Reader(GGUFReader):
    def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        """Refuse what lies beyond the end of the file, of which the package would make empty arrays."""
        if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
            raise ValueError("it ends too early")
        return super()._get(offset, dtype, count, override_order)


def from_gguf(path: Path, dtype: torch.dtype) -> PortableModel:
    """Make a language model of a GGUF file, as `from_huggingface`."""
    metadata, tensors = _read(path)
    kind = str(metadata.get(Keys.General.ARCHITECTURE))
    choose(f"{Keys.General.ARCHITECTURE} in {path}", _ENTRIES, kind)
    if "token_embd.weight" not in tensors:
        raise ValueError(sentence(str(path), "not one model's (missing: token_embd.weight)", _WHOLE))
    own = {key.removeprefix(f"{kind}."): value for key, value in metadata.items()}
    entries = _entries(kind, Settings(own, str(path)))
    entries["vocab_size"] = int(tensors["token_embd.weight"].shape[-1])
    entries["tie_word_embeddings"] = "output.weight" not in tensors
    architecture = ARCHITECTURES[entries["model_type"]]
    outline = outline_of(architecture, entries, len(tensors), str(path))
    theirs = weights_by_their_names(outline, rules_of(architecture, outline.config))
    model = filled(outline, architecture, _weights(kind, tensors, theirs, path), str(path), dtype)
    return PortableModel(model, read_tokenizer(metadata, str(path)))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, gguf.ReaderTensor]]:
    """Return the metadata of a file and its tensors, which stay on the disk."""
    expected = "a whole file, little-endian and of version 2 or 3"
    try:
        reader = _Reader(path, "c")
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # whatever the package raises for content that it cannot read
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise ValueError(sentence(str(path), f"not readable as GGUF ({one_line(error)})", expected)) from error
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise ValueError(sentence(str(path), "a big-endian GGUF file", expected))
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _entries(kind: str, settings: Settings) -> dict[str, Any]:
    """Make the entries of transformers' config.json."""
    names = _ENTRIES[kind]
    entries: dict[str, Any] = {entry: settings.size(key) for key, entry in names.items() if key != _NORM}
    d_model, inner = entries["hidden_size"], entries[names[_INNER]]
    require(inner % d_model == 0, _INNER, inner, f"a multiple of embedding_length = {d_model}")
    epsilon = float(str(np.float32(settings.number(_NORM))))  # 1e-05, which is another number in float64
    entries |= {"model_type": kind, names[_INNER]: inner // d_model, names[_NORM]: epsilon}
    if kind == "mamba2":
        entries["head_dim"] = inner // entries["num_heads"]
    elif kind == "jamba":
        entries |= _attention(settings, entries["num_hidden_layers"])
    elif settings.flag("ssm.dt_b_c_rms", False):
        entries |= {"model_type": "falcon_mamba", "mixer_rms_eps": epsilon}
    return entries


def _attention(settings: Settings, n_layer: int) -> dict[str, Any]:
    """Where Jamba attends, by the heads of keys and values in each layer."""
    heads = settings.numbers("attention.head_count_kv") or []
    require(len(heads) == n_layer, "attention.head_count_kv", heads, f"a number for each of {n_layer} layers")
    period, offset = regular_places([n_heads > 0 for n_heads in heads], "attention.head_count_kv", heads, "attention")
    settings.only(expert_count=(0, 1))
    places = {"attn_layer_period": period, "attn_layer_offset": offset}
    return {**places, "num_key_value_heads": max(heads) or None, "num_experts": 1}


def _weights(
    kind: str, tensors: Mapping[str, gguf.ReaderTensor], theirs: Mapping[str, Tensor], path: Path
) -> dict[str, Tensor]:
    """Return the tensors by transformers' names and in the shapes that `theirs` has."""
    names = _names(kind, theirs)
    if missing := names.values() - tensors.keys() - {"output.weight"}:  # which may be the embedding
        raise ValueError(sentence(str(path), f"not one model's (missing: {listed(sorted(missing))})", _WHOLE))
    weights = {
        name: _values(tensors[other], theirs[name].shape, path) for name, other in names.items() if other in tensors
    }
    weights |= {name: torch.log(-a.double()).float() for name, a in weights.items() if name.endswith(".A_log")}
    require_finite(weights, path)
    return weights | dict.fromkeys(tensors.keys() - set(names.values()), torch.empty(0))  # which no rule knows


def _names(kind: str, theirs: Iterable[str]) -> dict[str, str]:
    """Map transformers' names of tensors to llama.cpp's."""
    names = {name: name.replace(".dt_bias", ".dt_proj.bias") for name in theirs}
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], len(names))
    return {name: table.get_name(other, (".weight", ".bias")) or "" for name, other in names.items()}


def _values(tensor: gguf.ReaderTensor, shape: torch.Size, path: Path) -> Tensor:
    """Read a tensor in the shape that it has in transformers, which differs in dimensions of 1 and groups of a norm."""
    got = tuple(map(int, reversed(tensor.shape)))
    is_grouped = tensor.name.endswith("ssm_norm.weight") and math.prod(got) == shape.numel()
    if not is_grouped and [n for n in got if n != 1] != [n for n in shape if n != 1]:
        expected = f"{tuple(shape)}, as its metadata says"
        raise ValueError(sentence(f"the shape of {tensor.name} in {path}", got, expected))
    try:
        return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)).view(shape)
    except NotImplementedError as error:
        expected = "F32, F16, BF16 or a quantised one that the package gguf reads"
        raise ValueError(sentence(f"the type of {tensor.name} in {path}", tensor.tensor_type.name, expected)) from error


# --- writing ---


class _Array(np.ndarray):
    """An array whose `tofile`, which the package calls, raises on a full disk: NumPy's may lose the last bytes."""

    def tofile(self, file: Any) -> None:  # type: ignore[override]
        file.write(self.tobytes())


def to_gguf(portable: PortableModel, path: str | Path, *, dtype: GgufType = "f16") -> None:
    """Write a language model as a GGUF file, with its tokenizer.

    llama.cpp cuts a text as the tokenizer does, except that tokenizers of this package cut it into lines first, and may
    have tokens of blanks and the line feed after them. The file holds the tokenizer.json, too, which is read back.

    Args:
        portable: a `LanguageModel` of the shape of a MambaForCausalLM, FalconMambaForCausalLM, Mamba2ForCausalLM or
            JambaForCausalLM, and byte pairs.
        path: the file to write.
        dtype: what matrices are stored in; all else is float32. In Q8_0, matrices whose rows are no multiple of 32
            are float16.

    Raises:
        ValueError: llama.cpp has no such model or no such tokenizer.
    """
    require_literal(GgufType, dtype=dtype)
    architecture, entries, weights = published_form(portable.model)
    if (kind := _KINDS.get(architecture.model_type)) is None:
        expected = ", ".join(ARCHITECTURES[name].class_name for name in _KINDS)
        raise ValueError(sentence("model", f"a {architecture.class_name}", f"one that llama.cpp has: {expected}"))
    with replacing(Path(path)) as file:
        writer = GGUFWriter(file.name, kind)
        _write_metadata(writer, kind, entries)
        write_tokenizer(writer, portable.tokenizer, entries["vocab_size"])
        for name, other in _names(kind, weights).items():
            values = _laid_out(weights[name].float(), name, entries).numpy()
            stored = _stored(other, values, GGMLQuantizationType[dtype.upper()])
            writer.add_tensor(other, gguf.quantize(values, stored).view(_Array), raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _write_metadata(writer: GGUFWriter, kind: str, entries: dict[str, Any]) -> None:
    names = _ENTRIES[kind]
    expand, epsilon = entries[names[_INNER]], entries[names[_NORM]]
    require(expand == 2 or kind == "mamba2", "expand", expand, "2, all that llama.cpp reads")
    n_experts = entries.get("num_experts", 1)
    require(n_experts == 1, "n_experts", n_experts, "no mixtures of experts, which are not written as GGUF")
    values = entries | {names[_INNER]: expand * entries["hidden_size"]}
    for key, entry in names.items():
        (writer.add_float32 if key == _NORM else writer.add_uint32)(f"{kind}.{key}", values[entry])
    writer.add_context_length(_MOST_CONTEXT)
    if kind == "jamba":
        period, offset = entries["attn_layer_period"], entries["attn_layer_offset"]
        attends = [number % period == offset for number in range(entries["num_hidden_layers"])]
        writer.add_head_count_kv([entries["num_key_value_heads"] * attends_here for attends_here in attends])
        return
    writer.add_feed_forward_length(0)  # which llama.cpp wants, and does not use
    writer.add_head_count(0)
    if "mixer_rms_eps" in entries:
        expected = f"norm_epsilon = {epsilon}, as llama.cpp has one number for both"
        require(entries["mixer_rms_eps"] == epsilon, "selection_norm", entries["mixer_rms_eps"], expected)
        writer.add_ssm_dt_b_c_rms(True)


def _laid_out(tensor: Tensor, name: str, entries: Mapping[str, Any]) -> Tensor:
    """Return a tensor of transformers as llama.cpp has it."""
    if name.endswith(".A_log"):
        tensor = -torch.exp(tensor.double()).float()
    if name.endswith("conv1d.weight"):
        return tensor.squeeze(1)
    if name.endswith((".A_log", ".D")) and "num_heads" in entries:
        return tensor[:, None]
    return tensor.view(entries["n_groups"], -1) if name.endswith(".mixer.norm.weight") else tensor


def _stored(name: str, values: np.ndarray, wanted: GGMLQuantizationType) -> GGMLQuantizationType:
    """The type of a tensor: matrices alone are less than float32."""
    if not name.endswith(".weight") or values.ndim < 2 or name.endswith(("ssm_conv1d.weight", "ssm_norm.weight")):
        return GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[wanted]
    return wanted if values.shape[-1] % block == 0 else GGMLQuantizationType.F16
