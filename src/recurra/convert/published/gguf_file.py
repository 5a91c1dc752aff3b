"""GGUF files, which llama.cpp reads: the models of `_gguf_kinds` and `_gguf_hybrids`.

Weights go by way of transformers' layout. llama.cpp's names for them are those of the package `gguf`. Needs the extra
`hf`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
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
from recurra.convert.published._gguf_hybrids import KINDS, RWKV7
from recurra.convert.published._gguf_kinds import Entries, Kind
from recurra.convert.published._gguf_tokenizer import read_tokenizer, write_tokenizer
from recurra.convert.published._rules import (
    Place,
    Rule,
    fused_of,
    join_fused,
    listed,
    places_of,
    rules_of,
    weights_by_their_names,
)
from recurra.convert.published._settings import Settings
from recurra.convert.published.folder import ARCHITECTURES, filled, outline_of, published_form

_ARCHITECTURE_OF = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
_ARCHITECTURES = ARCHITECTURES | {RWKV7.model_type: RWKV7}
_KINDS = {kind.name: kind for kind in KINDS}
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
    name = str(metadata.get(Keys.General.ARCHITECTURE))
    kind: Kind = choose(f"{Keys.General.ARCHITECTURE} in {path}", _KINDS, name)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or not len(embedding.shape):
        raise ValueError(sentence(str(path), "not one model's (missing: token_embd.weight)", _WHOLE))
    own = {key.removeprefix(f"{name}."): value for key, value in metadata.items()}
    entries = kind.entries(Settings(own, str(path)), set(tensors), int(embedding.shape[-1]))
    architecture = _ARCHITECTURES[entries["model_type"]]
    outline = outline_of(architecture, entries, str(path))
    n_layer, n_blocks = entries["num_hidden_layers"], int(own["block_count"])
    ahead = tuple(f"blk.{number}." for number in range(n_layer, n_blocks))
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(ahead)}
    theirs = weights_by_their_names(outline.to(dtype), rules_of(architecture, outline.config))
    theirs = join_fused(theirs, fused_of(architecture, outline.config))
    model = filled(outline, architecture, _weights(kind, entries, tensors, theirs, path), str(path), dtype)
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


def _weights(
    kind: Kind, entries: Entries, tensors: Mapping[str, gguf.ReaderTensor], theirs: Mapping[str, Tensor], path: Path
) -> dict[str, Tensor]:
    """Return the tensors by transformers' names, with the shapes and dtypes of `theirs`."""
    places = _places(kind, entries, theirs)
    known = {name for place in places for name in place.theirs}
    if missing := known - tensors.keys() - {"output.weight"}:  # which may be the embedding
        raise ValueError(sentence(str(path), f"not one model's (missing: {listed(sorted(missing))})", _WHOLE))
    weights = {}
    for place in (place for place in places if tensors.keys() >= set(place.theirs)):
        parts = place.rule.write(theirs[place.own])  # of the right shapes, without memory
        found = [_values(tensors[name], part.shape, path) for name, part in zip(place.theirs, parts, strict=True)]
        weights[place.own] = place.rule.read(*found).to(theirs[place.own].dtype)
    require_finite(weights, path)
    return weights | dict.fromkeys(tensors.keys() - known, torch.empty(0))  # which no rule knows


def _places(kind: Kind, entries: Entries, theirs: Iterable[str]) -> list[Place]:
    """Find llama.cpp's names for transformers' tensors."""
    table = gguf.get_tensor_name_map(_ARCHITECTURE_OF[kind.name], entries["num_hidden_layers"])
    found = places_of(theirs, [*kind.rules(entries), Rule("(.*)", (r"\1",))])
    known = {name: table.get_name(name, (".weight", ".bias")) or name for place in found for name in place.theirs}
    return [place._replace(theirs=tuple(known[name] for name in place.theirs)) for place in found]


def _values(tensor: gguf.ReaderTensor, shape: torch.Size, path: Path) -> Tensor:
    """Read a tensor in a shape that may differ from its own in dimensions of 1."""
    got = tuple(map(int, reversed(tensor.shape)))
    if [n for n in got if n != 1] != [n for n in shape if n != 1]:
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


def to_gguf(portable: PortableModel, path: str | Path, *, dtype: GgufType = "f16", in_place: bool = False) -> None:
    """Write a language model as a GGUF file, with its tokenizer.

    llama.cpp cuts a text as the tokenizer does, except that tokenizers of this package cut it into lines first, and may
    have tokens of blanks and the line feed after them. The file holds the tokenizer.json, too, which is read back.

    Args:
        portable: a `LanguageModel` that llama.cpp has, too: a Mamba, Falcon Mamba, Mamba-2, Jamba (dense), Granite 4.0,
            Falcon-H1, LFM2, Qwen3.5 (dense) or RWKV-7; and byte pairs.
        path: the file to write.
        dtype: what matrices are stored in; all else is float32. In Q8_0 and Q4_0, matrices whose row length is not
            a multiple of 32 are float16.
        in_place: move the weights out of the model, which is empty afterwards: for models that barely fit into memory.

    Raises:
        ValueError: llama.cpp has no such model or no such tokenizer.
    """
    require_literal(GgufType, dtype=dtype)
    architecture, entries, weights = published_form(portable.model, _ARCHITECTURES.values(), in_place=in_place)
    kind = next((kind for kind in KINDS if kind.model_type == architecture.model_type), None)
    if kind is None:
        expected = ", ".join(ARCHITECTURES[kind.model_type].class_name for kind in KINDS)
        raise ValueError(sentence("model", f"a {architecture.class_name}", f"one that llama.cpp has: {expected}"))
    with replacing(Path(path)) as file, closing(GGUFWriter(file.name, kind.name)) as writer:
        for key, value in kind.metadata(entries).items():
            _ADD[type(value)](writer, f"{kind.name}.{key}", value)
        write_tokenizer(writer, portable.tokenizer, entries["vocab_size"])
        places, wanted = _places(kind, entries, weights), GGMLQuantizationType[dtype.upper()]
        for place in places:  # without memory
            for name, part in zip(place.theirs, place.rule.write(weights[place.own].to("meta").float()), strict=True):
                stored = _stored(name, part.shape, wanted)
                shape = gguf.quant_shape_to_byte_shape(part.shape, stored)
                writer.add_tensor_info(name, shape, np.dtype(np.uint8), math.prod(shape), raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for place in places:
            for name, part in zip(place.theirs, place.rule.write(weights.pop(place.own).float()), strict=True):
                writer.write_tensor_data(_quantised(name, part.contiguous().numpy(), wanted))


_ADD: dict[type, Callable[..., None]] = {
    bool: GGUFWriter.add_bool,
    int: GGUFWriter.add_uint32,
    float: GGUFWriter.add_float32,
    list: GGUFWriter.add_array,
}


def _quantised(name: str, values: np.ndarray, wanted: GGMLQuantizationType) -> np.ndarray:
    stored = _stored(name, values.shape, wanted)
    largest = np.abs(values).max(initial=0.0)
    most = np.finfo(np.float16).max if stored == GGMLQuantizationType.F16 else np.finfo(np.float32).max
    require(largest <= most, name, f"one with {largest:.3g}", f"finite numbers up to {most:.3g}", "choose the type f32")
    return gguf.quantize(values, stored).view(_Array)


_EXACT = ("ssm_conv1d.weight", "ssm_norm.weight", "shortconv.conv.weight", "time_mix_lerp_fused.weight")


def _stored(name: str, shape: Sequence[int], wanted: GGMLQuantizationType) -> GGMLQuantizationType:
    """The type of a tensor: only matrices are stored in less than float32."""
    if not name.endswith(".weight") or len(shape) < 2 or name.endswith(_EXACT):
        return GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[wanted]
    return wanted if shape[-1] % block == 0 else GGMLQuantizationType.F16
