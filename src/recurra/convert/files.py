"""Weights from files of other code bases."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CONTAINERS = ("model_state", "state_dict", "model")


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read a file of weights by their names: `.safetensors`, or what torch.save wrote (`.pyth`, `.bin`, `.pt`).

    Reading runs no code of the file. Of a whole training checkpoint the weights are taken, which stand under
    `model_state` in those of TimeSformer's code, elsewhere under `state_dict` or `model`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else than weights, or objects that could only be made by running its code.
        ImportError: the file ends in .safetensors and the package safetensors is not installed.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is not a file of weights that torch can read without running its code") from error
    return weights_of(content, f"{path}")


def weights_of(content: Any, source: str = "state_dict") -> dict[str, Tensor]:
    """Return the weights by name, from a checkpoint or from a dictionary that holds nothing else.

    Raises:
        ValueError: there are none.
    """
    for name in _CONTAINERS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(
            f"{source} holds no weights by name; expected tensors, or a checkpoint with them under "
            f"{', '.join(_CONTAINERS)}"
        )
    return dict(content)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise ImportError(f"{path} is a file of the package safetensors: pip install safetensors") from error
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
