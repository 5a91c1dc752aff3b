"""Folders of transformers' own classes and RWKV-7's files, read as a language model here and written back."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from recurra._files.reading import read_json, read_text
from recurra._files.weights import shape_difference, write_safetensors
from recurra._files.writing import put_in_place, replace_files, replacing
from recurra.checks import choose, sentence
from recurra.convert.portable import PortableModel, dtype_of, read_weights, retie, tied_parameters, with_weights
from recurra.convert.published._bambas import BAMBA, FALCON_H1, GRANITE, NEMOTRON_H
from recurra.convert.published._delta_nets import OLMO_HYBRID, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, of_qwen3_5
from recurra.convert.published._hybrids import LFM2, LFM2_MOE, RECURRENT_GEMMA
from recurra.convert.published._linear_attention import KIMI_LINEAR, MINIMAX
from recurra.convert.published._mambas import FALCON_MAMBA, JAMBA, MAMBA, MAMBA2, ZAMBA2, of_the_authors
from recurra.convert.published._recurrent import OF_THE_AUTHORS, RWKV, RWKV7, XLSTM, entries_of_pth, without_unused
from recurra.convert.published._rules import (
    EXPERTS,
    Architecture,
    Stack,
    fill,
    fused_of,
    join_fused,
    matched,
    read_config,
    rules_of,
    settings_of,
    split_fused,
    usual_names,
    weights_by_their_names,
)
from recurra.convert.published._settings import Settings
from recurra.data.tokenizers import BytePairEncoding
from recurra.mixers.base import mixer_options
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.models.registry import on_meta

ARCHITECTURES = {
    one.model_type: one
    for one in (
        *(JAMBA, ZAMBA2, MAMBA, FALCON_MAMBA, MAMBA2, NEMOTRON_H, BAMBA, FALCON_H1, GRANITE, LFM2, LFM2_MOE),
        *(KIMI_LINEAR, MINIMAX, OLMO_HYBRID, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, RECURRENT_GEMMA, RWKV, RWKV7, XLSTM),
    )
}
"""The published architectures that can be converted, by the model_type of their config.json."""
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_OF_NEW_WEIGHTS = ("min_step", "max_step", "r_min", "r_max")
"""Options of mixers that matter when weights are drawn alone."""
_TEMPLATE = "chat_template.jinja"
_ENDS = "eos_tokens"
_EOS_IDS = "eos_token_id"


def model_type_of(folder: Path) -> str:
    """Return the model_type in a folder's config.json; empty if there is none."""
    return str(_read_entries(folder / "config.json").get("model_type", ""))


def _read_entries(path: Path) -> dict[str, Any]:
    """Read a config.json; that of the authors of Mamba, or of images and text, becomes that of a language model."""
    entries: dict[str, Any] = read_json(path)
    if "d_model" in entries and "model_type" not in entries:
        return of_the_authors(entries, str(path))
    return of_qwen3_5(entries, str(path))


def from_huggingface(folder: str | Path, *, dtype: torch.dtype = torch.float32) -> PortableModel:
    """Convert a published language model: a folder of transformers' own class, a GGUF file, or RWKV-7's .pth.

    Its logits, and its states at any cut of a stream, equal those of transformers' class (for RWKV-7, of the authors'
    code). This needs neither transformers nor code from the folder.

    Args:
        folder: config.json, weights in model.safetensors or pytorch_model.bin, whole or in shards with an index, and
            tokenizer.json if there is one; or a folder in the format of Mamba's authors; or a GGUF file of an
            architecture that `to_gguf` writes (needs the extra `hf`); or a .pth file of RWKV-7's authors.
        dtype: the model's dtype; stored weights of any dtype are converted.

    Returns:
        the model in evaluation mode, and its tokenizer and chat template (None if the folder has none). The template's
        first lines set `bos_token`, `eos_token` and `eos_tokens`, the strings that end an answer.

    Raises:
        ValueError: the architecture or an entry of config.json is not supported, or weights are missing.
    """
    folder = Path(folder)
    if folder.suffix == ".pth":
        weights = without_unused(read_weights(folder))
        entries = entries_of_pth(weights, str(folder))
        outline = outline_of(OF_THE_AUTHORS, entries, str(folder))
        return PortableModel(filled(outline, OF_THE_AUTHORS, weights, str(folder), dtype), None)
    if folder.is_file():
        from recurra.convert.published.gguf_file import from_gguf  # of the extra hf

        return from_gguf(folder, dtype=dtype)
    entries = _read_entries(folder / "config.json")
    architecture: Architecture = choose(f"model_type in {folder}", ARCHITECTURES, entries.get("model_type"))
    weights = usual_names(architecture, _read_folder_weights(folder))
    outline = outline_of(architecture, entries, str(folder / "config.json"))
    factors = architecture.folded(entries, outline.config)
    model = filled(outline, architecture, weights, str(folder), dtype, factors)
    if not (file := folder / "tokenizer.json").is_file():
        return PortableModel(model, None)
    tokenizer = BytePairEncoding.load(file)
    return PortableModel(model, tokenizer, chat_template=_read_chat_template(folder, tokenizer))


def outline_of(architecture: Architecture, entries: dict[str, Any], name: str) -> LanguageModel:
    """Make the model of a config.json, called `name`, without memory for its weights."""
    config = read_config(architecture, Settings(entries, name))
    with on_meta():
        return LanguageModel(config)


def filled(
    outline: LanguageModel,
    architecture: Architecture,
    weights: dict[str, Tensor],
    what: str,
    dtype: torch.dtype,
    factors: Mapping[str, Tensor] = MappingProxyType({}),
) -> LanguageModel:
    """Allocate an outlined model and fill it with weights that have transformers' names and come from `what`.

    weights: modified, so that none is held longer than needed.
    """
    weights = split_fused(weights, fused_of(architecture, outline.config), what)
    if outline.config.biases and not outline.config.tie_embeddings:  # their heads have none
        weights.setdefault(_head_bias(architecture), torch.zeros(outline.config.vocab_size))
    places = matched(outline, weights, rules_of(architecture, outline.config), what)
    model = _with_memory(outline, dtype)
    fill(model, weights, places, what, factors)
    return model.eval()


def _head_bias(architecture: Architecture) -> str:
    return architecture.head.removesuffix("weight") + "bias"


def _with_memory(outline: LanguageModel, dtype: torch.dtype) -> LanguageModel:
    """Give an outlined model memory, with nothing in it yet, and tie again what was tied."""
    tied = tied_parameters(outline)
    assert not list(outline.buffers()), "a buffer is no weight, and would be left empty"
    model: LanguageModel = outline.to(dtype).to_empty(device="cpu")
    retie(model, tied)
    return model


def _read_folder_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a folder, in one file or in shards that an index lists."""
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return read_weights(folder / name)
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _read_shards(folder, index)
    raise FileNotFoundError(sentence(f"{folder}", "without weights", f"{' or '.join(_WEIGHTS)}, or their shards"))


def _read_shards(folder: Path, index: Path) -> dict[str, Tensor]:
    places, weights = read_json(index).get("weight_map"), dict[str, Tensor]()
    if not isinstance(places, dict) or not all(name and name == Path(str(name)).name for name in places.values()):
        raise ValueError(sentence(str(index), "no index", "an object with weight_map, tensors to files of the folder"))
    for name in sorted(set(places.values())):
        weights |= read_weights(folder / name)
    return weights


def _read_chat_template(folder: Path, tokenizer: BytePairEncoding) -> str | None:
    """Read the chat template of a folder for transformers; None if it has none.

    Its first lines then set what a template alone does not know: bos_token and eos_token as the folder names them, and
    eos_tokens, the texts of all tokens at which the model ends an answer.
    """
    file, settings = folder / _TEMPLATE, _entries_if_any(folder / "tokenizer_config.json")
    template: Any = read_text(file) if file.is_file() else settings.get("chat_template")
    if isinstance(template, list):  # older folders may have several, by name
        named = (one for one in template if isinstance(one, dict) and one.get("name") == "default")
        template = next(named, {}).get("template")
    if not isinstance(template, str):
        return None
    if f"{{% set {_ENDS} =" in template:
        return template
    special = {name: _text(settings.get(name)) for name in ("bos_token", "eos_token")}
    sources = (_entries_if_any(folder / "generation_config.json"), _entries_if_any(folder / "config.json"))
    ids: Any = next((entries[_EOS_IDS] for entries in sources if entries.get(_EOS_IDS) is not None), [])
    ids = [
        number
        for number in (ids if isinstance(ids, list) else [ids])
        if type(number) is int and 0 <= number < len(tokenizer)
    ]
    ends = dict.fromkeys([special["eos_token"], *(tokenizer.decode([number]) for number in ids)])
    values = {**special, _ENDS: [end for end in ends if end]}
    lines = (
        f"{{% set {name} = {json.dumps(value, ensure_ascii=False)} %}}\n" for name, value in values.items() if value
    )
    return "".join([*lines, template])


def _entries_if_any(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _text(token: Any) -> str | None:
    """The text of a special token, which may be an object."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def to_huggingface(
    portable: PortableModel, folder: str | Path, *, model_type: str | None = None, in_place: bool = False
) -> None:
    """Write a language model as a folder that transformers loads with its own class, without code of this package.

    Files: config.json, model.safetensors and, if there are any, tokenizer.json and chat_template.jinja.

    Args:
        portable: a `LanguageModel` with one of the known architectures.
        folder: where to write them.
        model_type: the target class, by the model_type of its config.json; the first that fits if None. This
            matters for Qwen3-Next ("qwen3_next"): if it is dense, or has experts in all blocks, it is also a Qwen3.5
            ("qwen3_5_text" or "qwen3_5_moe_text", the default).
        in_place: move the weights out of the model, which is empty afterwards: for models that barely fit into memory.

    Raises:
        ValueError: transformers has no class for such a model.
    """
    known = ARCHITECTURES if model_type is None else {model_type: choose("model_type", ARCHITECTURES, model_type)}
    dtype = str(dtype_of(portable.model)).removeprefix("torch.")
    architecture, entries, weights = published_form(portable.model, known.values(), in_place=in_place)
    entries |= {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "dtype": dtype,
    }
    files = {}
    if isinstance(portable.tokenizer, BytePairEncoding):
        files["tokenizer.json"] = portable.tokenizer.to_json().encode()
    if portable.chat_template is not None:
        files[_TEMPLATE] = portable.chat_template.encode()
    files["config.json"] = json.dumps(entries, indent=2).encode()
    with put_in_place(Path(folder)) as scratch:
        with replacing(scratch / "model.safetensors") as file:
            write_safetensors(file, weights, {"format": "pt"})
        replace_files({scratch / name: content for name, content in files.items()})


def to_pth(portable: PortableModel, path: str | Path) -> None:
    """Write a language model as a .pth file in the layout of the authors of RWKV-7, which has no tokenizer.

    Args:
        portable: a `LanguageModel` of the mixers `rwkv7` and `rwkv7-channel-mixing` in turn, with an embedding norm.
        path: the file to write.

    Raises:
        ValueError: their code has no such model.
    """
    _described(portable.model, [OF_THE_AUTHORS])
    weights = weights_by_their_names(portable.model, rules_of(OF_THE_AUTHORS, portable.model.config))  # type: ignore
    with replacing(Path(path)) as file:
        torch.save(
            {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}, file
        )


def published_form(
    model: nn.Module, known: Iterable[Architecture], *, in_place: bool = False
) -> tuple[Architecture, dict[str, Any], dict[str, Tensor]]:
    """Return the first architecture that has this model's shape, the entries of its config.json, and its weights.

    The weights may share the model's memory. in_place: move them out of the model.
    """
    architecture, entries = _described(model, known)
    config: Any = model.config
    weights = weights_by_their_names(model, rules_of(architecture, config), in_place=in_place)
    if config.tie_embeddings:
        del weights[architecture.head]
    bias = weights.pop(_head_bias(architecture), None)
    if bias is not None and bias.any():
        expected = f"zeros, as the head of a {architecture.class_name} has no bias"
        raise ValueError(sentence("head.linear.bias", "not zero", expected, "train with model.tie_embeddings true"))
    return architecture, entries, architecture.derived(join_fused(weights, fused_of(architecture, config)))


def without_unused_tokens(portable: PortableModel) -> PortableModel:
    """Remove the tokens that the tokenizer does not have: published tables are filled up to a round number of rows."""
    model, tokenizer = portable.model, portable.tokenizer
    if tokenizer is None or not isinstance(model, LanguageModel) or model.config.vocab_size == len(tokenizer):
        return portable
    n_tokens, known = len(tokenizer), model.config.vocab_size
    if known < n_tokens:
        raise ValueError(sentence("the model's vocabulary", f"{known} tokens", f"the {n_tokens} of its tokenizer"))
    with on_meta():
        smaller = LanguageModel(replace(model.config, vocab_size=n_tokens))
    weights = {
        name: tensor[:n_tokens].clone() if name.startswith(("embedding.", "head.")) else tensor
        for name, tensor in model.state_dict().items()
    }
    return portable._replace(model=with_weights(smaller, weights).eval())


def _described(model: nn.Module, architectures: Iterable[Architecture]) -> tuple[Architecture, dict[str, Any]]:
    """The first architecture that has this model's shape, and the entries of its config.json."""
    if not isinstance(model, LanguageModel):
        raise ValueError(sentence("model", f"a {type(model).__name__}", "a LanguageModel"))
    config, stack = model.config, Stack(model.config)
    found = next((one for one in architectures if one.mixer in stack.mixers and one.fits(stack)), None)
    if found is None:
        known = ", ".join(dict.fromkeys(one.mixer for one in architectures))
        raise ValueError(sentence("mixer", config.mixer, f"one that transformers has a class for: {known}"))
    entries = settings_of(found, config)
    theirs = read_config(found, Settings(entries, "config.json"))
    if config.output_size == config.vocab_size:
        config = replace(config, output_size=None)
    config, theirs = _with_all_named(config), _with_all_named(theirs)
    if differing := [*_differing_fields(config, theirs), *_differing_options(config, theirs)]:
        raise ValueError(sentence("model", f"one with {', '.join(differing)}", f"the shape of a {found.class_name}"))
    with on_meta():
        difference = shape_difference(LanguageModel(theirs), model.state_dict())
    if difference:
        raise ValueError(sentence("model", f"one with {difference}", f"the shape of a {found.class_name}"))
    return found, entries


def _with_all_named(config: LanguageModelConfig) -> LanguageModelConfig:
    """Name what each block has; the size of dense networks does not matter where there are none."""
    is_sparse = set(config.feed_forwards) == {EXPERTS}
    d_hidden = Stack(config).experts["d_expert"] if is_sparse else config.d_channel_mixing
    networks, places = config.feed_forwards, config.norm_places
    return replace(config, feed_forward=networks, norm_place=places, d_channel_mixing=d_hidden)


def _differing_fields(config: LanguageModelConfig, theirs: LanguageModelConfig) -> list[str]:
    pairs = {field.name: (getattr(config, field.name), getattr(theirs, field.name)) for field in fields(config)}
    others = ("mixer_options", "feed_forward_options", "dropout")
    return [f"{name} {a!r} instead of {b!r}" for name, (a, b) in pairs.items() if name not in others and _differ(a, b)]


def _differ(one: Any, other: Any) -> bool:
    """Compare entries; numbers that are products or quotients there may be rounded on the way."""
    if isinstance(one, float) and isinstance(other, float):
        return not math.isclose(one, other, rel_tol=1e-12)
    return bool(one != other)


def _differing_options(config: LanguageModelConfig, theirs: LanguageModelConfig) -> list[str]:
    """Compare the mixers; a None that stands for a size that follows from others shows in the weights."""
    own, options = (stack.options | {EXPERTS: stack.experts} for stack in (Stack(config), Stack(theirs)))
    return [
        f"{option} {value!r} instead of {options[name][option]!r} of {name}"
        for name, given in own.items()
        if name in options  # if not, mixers differ
        for option, value in given.items()
        if option not in _OF_NEW_WEIGHTS and _differ(value, options[name][option])
        if None not in (value, options[name][option]) or mixer_options(name)[option] is not None
    ]
