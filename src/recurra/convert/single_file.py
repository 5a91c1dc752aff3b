"""A language model in one safetensors file: weights, and configuration and tokenizer in its metadata."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recurra.checks import sentence
from recurra.convert.portable import (
    PortableModel,
    tied_parameters,
    tokenizer_from_json,
    tokenizer_to_json,
)
from recurra.files.digests import content_digest
from recurra.files.reading import parse_json, require_fields
from recurra.files.weights import read_safetensors, require_finite, shape_difference, write_safetensors
from recurra.files.writing import replacing
from recurra.models import DataSizes, entry_of, list_models
from recurra.models.outline import outlined

_FORMAT = "recurra model 2"
_WRITTEN = "a file that `recurra convert` wrote"
_TYPES = {
    "format": str,
    "model": str,
    "config": dict[str, Any],
    "experiment": dict[str, Any] | None,
    "step": int | None,
}
"""The description's keys and their types; the digest is added to them."""


def save_single_file(portable: PortableModel, path: Path) -> None:
    """Write a model as one safetensors file, completely or not at all; tied weights are stored once.

    The metadata has the key `recurra`, JSON with the model's class and configuration, and with the experiment and the
    step if they are known, and a digest of all content; and the key `tokenizer`, if there is one.

    Raises:
        OSError: it cannot be written.
        TypeError: the model is not a language model.
    """
    description = {
        "format": _FORMAT,
        "model": entry_of(portable.model).model.__name__,
        "config": asdict(portable.model.config),  # type: ignore[call-overload]
        "experiment": portable.experiment,
        "step": portable.step,
    }
    tokenizer = None if portable.tokenizer is None else tokenizer_to_json(portable.tokenizer)
    tied = tied_parameters(portable.model)
    weights = {name: tensor for name, tensor in portable.model.state_dict().items() if name not in tied}
    description["digest"] = content_digest({**description, "tokenizer": tokenizer}, weights)
    metadata = {"format": "pt", "recurra": json.dumps(description)}
    if tokenizer is not None:
        metadata["tokenizer"] = tokenizer
    with replacing(path) as file:
        write_safetensors(file, weights, metadata)


def load_single_file(path: Path) -> PortableModel:
    """Read what `save_single_file` wrote; the model is in evaluation mode and on the CPU.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, was not written by `save_single_file`, or has weights that are not finite.
    """
    weights, metadata = read_safetensors(path, _WRITTEN)
    if "recurra" not in metadata:
        raise ValueError(sentence(str(path), "one that does not say which model its weights belong to", _WRITTEN))
    description = parse_json(metadata["recurra"], f"the description in {path}", allow_nan=True)
    _require_sound(description, metadata, weights, path)
    require_finite(weights, path)
    model = _build(description, weights, path)
    text = metadata.get("tokenizer")
    tokenizer = None if text is None else tokenizer_from_json(text, f"the tokenizer in {path}")
    return PortableModel(model.eval(), tokenizer, description["experiment"], description["step"])


def _require_sound(
    description: dict[str, Any], metadata: dict[str, str], weights: dict[str, Tensor], path: Path
) -> None:
    """Refuse a description of another format or form, and content that does not match its digest."""
    found = description.get("format")
    if found != _FORMAT:
        raise ValueError(sentence(str(path), f"in the format {found!r}", repr(_FORMAT)))
    digest = description.pop("digest", None)
    if digest != content_digest({**description, "tokenizer": metadata.get("tokenizer")}, weights):
        raise ValueError(sentence(str(path), "damaged: its content does not match its digest", _WRITTEN))
    if description.keys() != _TYPES.keys():
        came = f"one with {', '.join(sorted(description))}"
        raise ValueError(sentence(f"the description in {path}", came, ", ".join(_TYPES)))
    require_fields(description, _TYPES, f"the description in {path}", finite=False)


def _build(description: dict[str, Any], weights: dict[str, Tensor], path: Path) -> nn.Module:
    """Make the model and load the weights, which must be all of its own: the file has to be as large as the model."""
    entry = next((entry for entry in list_models(DataSizes) if entry.model.__name__ == description["model"]), None)
    if entry is None:
        raise ValueError(sentence(str(path), f"of a {description['model']}", "a model that this version knows"))
    try:
        config = entry.config(**description["config"])
        if config.n_layer > len(weights):
            raise ValueError(sentence(f"n_layer in {path}", config.n_layer, f"at most {len(weights)}, one per weight"))
        with outlined():  # takes no memory, whatever the sizes
            outline = entry.model(config)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: {error}") from error
    tied = tied_parameters(outline)
    weights = {**weights, **{name: weights[first] for name, first in tied.items() if first in weights}}
    if difference := shape_difference(outline, weights):
        came = f"one with other weights than its configuration says (it has {difference})"
        raise ValueError(sentence(str(path), came, _WRITTEN))
    with torch.device("cpu"):
        model: nn.Module = entry.model(config)
    for name, own in model.state_dict(keep_vars=True).items():
        own.data = own.data.to(weights[name].dtype)  # or loading would round them to torch's default type
    model.load_state_dict(weights)
    return model
