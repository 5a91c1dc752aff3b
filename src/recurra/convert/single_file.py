"""A language model in one safetensors file: weights, and configuration and tokenizer in its metadata."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from recurra.convert.portable import (
    PortableModel,
    tied_parameters,
    tokenizer_from_json,
    tokenizer_to_json,
)
from recurra.files.writing import replacing
from recurra.models import DataSizes, entry_of, list_models

_FORMAT = "recurra model 1"


def save_single_file(portable: PortableModel, path: Path) -> None:
    """Write a model as one safetensors file, completely or not at all; tied weights are stored once.

    The metadata has the key `recurra`, JSON with the model's class and configuration, and with the experiment and the
    step if they are known; and the key `tokenizer`, if there is one.

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
    metadata = {"format": "pt", "recurra": json.dumps(description)}
    if portable.tokenizer is not None:
        metadata["tokenizer"] = tokenizer_to_json(portable.tokenizer)
    tied = tied_parameters(portable.model)
    weights = {name: tensor for name, tensor in portable.model.state_dict().items() if name not in tied}
    with replacing(path) as file:
        file.write(save({name: tensor.contiguous() for name, tensor in weights.items()}, metadata))


def load_single_file(path: Path) -> PortableModel:
    """Read what `save_single_file` wrote; the model is in evaluation mode and on the CPU.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, or was not written by `save_single_file`.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error
    if "recurra" not in metadata:
        raise ValueError(
            f"{path} does not say which model its weights belong to; expected a file that `recurra convert` wrote"
        )
    description = json.loads(metadata["recurra"])
    if description.get("format") != _FORMAT:
        raise ValueError(f"{path} has the format {description.get('format')!r}; this version reads {_FORMAT!r}")
    model = _build(description, path)
    for name, first in tied_parameters(model).items():
        weights[name] = weights[first]
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{path} holds other weights than its configuration says: {error}") from error
    tokenizer = tokenizer_from_json(metadata["tokenizer"]) if "tokenizer" in metadata else None
    return PortableModel(model.eval(), tokenizer, description["experiment"], description["step"])


def _build(description: dict[str, Any], path: Path) -> nn.Module:
    for entry in list_models(DataSizes):
        if entry.model.__name__ == description["model"]:
            return entry.model(entry.config(**description["config"]))
    raise ValueError(f"{path} is of a {description['model']}; expected a model that this version knows")
