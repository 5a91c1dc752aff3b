"""Weights from files of other code bases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from recurra.checks import sentence
from recurra.files.weights import read_safetensors, require_finite

_EXPECTED = "one that torch can read without running its code"
_CONTAINERS = ("model_state", "state_dict", "model")


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read a file of weights by their names: `.safetensors`, or what torch.save wrote (`.pyth`, `.bin`, `.pt`).

    Reading runs no code of the file. Of a whole training checkpoint the weights are taken, which stand under
    `model_state` in those of TimeSformer's code, elsewhere under `state_dict` or `model`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, holds something else than weights, objects that could only be made by running its
            code, or weights that are not finite.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        weights, _ = read_safetensors(path, _EXPECTED)
    else:
        weights = weights_of(_load_pickled(path), f"{path}")
    require_finite(weights, path)
    return weights


def _load_pickled(path: Path) -> Any:
    """Read what torch.save wrote, which only other code bases do, without running code of the file."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        for leaf in tree_leaves(content):
            # A tensor with strides of 0 can have any shape, and whoever copies it would allocate that.
            if isinstance(leaf, Tensor) and leaf.numel() * leaf.element_size() > path.stat().st_size:
                raise ValueError(f"a tensor of shape {tuple(leaf.shape)} is larger than the file")
    except Exception as error:  # whatever torch raises for content that it cannot read
        if isinstance(error, OSError) and error.filename is not None:
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(sentence(str(path), f"no file of weights ({reason})", _EXPECTED)) from error
    return content


def weights_of(content: Any, source: str = "state_dict") -> dict[str, Tensor]:
    """Return the weights by name, from a checkpoint or from a dictionary that holds nothing else.

    Raises:
        ValueError: there are none.
    """
    for name in _CONTAINERS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping) or not all(_is_weight(*item) for item in content.items()):
        raise ValueError(
            f"{source} holds no weights by name; expected tensors, or a checkpoint with them under "
            f"{', '.join(_CONTAINERS)}"
        )
    return dict(content)


def _is_weight(name: Any, value: Any) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided
