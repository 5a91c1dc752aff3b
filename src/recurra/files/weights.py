"""Weights by name, as files hold them: finite, of the model's shapes, and with a digest of their content."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from recurra.checks import sentence

_N_SHOWN = 3


def read_safetensors(path: Path, expected: str = "a safetensors file") -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors of a safetensors file by name, and its metadata.

    Args:
        path: the file.
        expected: what it should be, for messages.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged or of another format.
    """
    if not path.is_file():
        raise FileNotFoundError(sentence("file", f"{path}, which does not exist", expected))
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
            return tensors, dict(file.metadata() or {})
    except OSError:
        raise
    # Besides its own class, the library raises what reading a strange header leads to.
    except (SafetensorError, ValueError, TypeError, LookupError, RuntimeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(sentence(str(path), f"damaged or no safetensors file ({reason})", expected)) from error


def content_digest(content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Compute the SHA-256 digest of plain data and of tensors: of their names, types, shapes and bytes."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def require_finite(weights: Mapping[str, Tensor], source: Path | str) -> None:
    """Refuse weights with numbers that are not finite.

    Args:
        weights: by name.
        source: where they are from, for the message.

    Raises:
        ValueError: naming the first such tensor.
    """
    for name, tensor in weights.items():
        if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        # There is no isfinite for numbers of one byte.
        if not bool((tensor.float() if tensor.element_size() == 1 else tensor).isfinite().all()):
            came = "a tensor with numbers that are not finite"
            raise ValueError(sentence(f"{name} in {source}", came, "finite numbers"))


def shape_difference(model: nn.Module, weights: Mapping[str, Tensor]) -> str:
    """Say which parameters of `weights` are not there or of another shape in `model`, and the other way round.

    Returns:
        names and shapes of the first few; empty if all agree.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    saved = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    differing = sorted(name for name in shapes.keys() | saved.keys() if shapes.get(name) != saved.get(name))
    listed = ", ".join(
        f"{name} {saved.get(name, 'missing')}, here {shapes.get(name, 'missing')}" for name in differing[:_N_SHOWN]
    )
    return f"{listed} and {len(differing) - _N_SHOWN} more" if len(differing) > _N_SHOWN else listed
