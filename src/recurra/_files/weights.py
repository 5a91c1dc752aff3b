"""Tensors by name in safetensors files, and the checks of those that are a model's weights."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from recurra.checks import sentence

_N_SHOWN = 3
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def read_safetensors(path: Path, expected: str = "a safetensors file") -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors of a safetensors file by name, and its metadata. Raises OSError, and ValueError if damaged."""
    with _opened(path, expected) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        return tensors, dict(file.metadata() or {})


@contextmanager
def _opened(path: Path, expected: str) -> Iterator[Any]:
    if not path.exists() or path.is_dir():
        raise FileNotFoundError(sentence("file", f"{path}, which does not exist", expected))
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError:
        raise
    # Besides its own class, the library raises what reading a strange header leads to.
    except (SafetensorError, ValueError, TypeError, LookupError, RuntimeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(sentence(str(path), f"damaged or no safetensors file ({reason})", expected)) from error


def read_metadata(path: Path, expected: str = "a safetensors file") -> dict[str, str]:
    """Read the metadata of a safetensors file. Raises OSError, and ValueError as `read_safetensors`."""
    with _opened(path, expected) as file:
        return dict(file.metadata() or {})


def write_safetensors(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file tensor by tensor, so that no second copy of all of them is in memory.

    tensors: of any strides; those of one storage are written one by one.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that all are aligned
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise ValueError(sentence(name, f"of type {tensor.dtype}", expected))
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        file.write(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def require_finite(weights: Mapping[str, Tensor], source: Path | str) -> None:
    """Refuse weights, from `source` in messages, with numbers that are not finite."""
    for name, tensor in weights.items():
        if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        numbers = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        # One pass without a tensor of booleans, and NaN spreads. Numbers of one byte have no minimum.
        ends = (numbers.float() if numbers.element_size() == 1 else numbers).aminmax() if numbers.numel() else ()
        if not all(map(math.isfinite, ends)):
            got = "a tensor with numbers that are not finite"
            raise ValueError(sentence(f"{name} in {source}", got, "finite numbers"))


def shape_difference(model: nn.Module, weights: Mapping[str, Tensor]) -> str:
    """Name the first few parameters that `model` or `weights` lacks, or has in another shape; "" if all agree."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    saved = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    differing = sorted(name for name in shapes.keys() | saved.keys() if shapes.get(name) != saved.get(name))
    listed = ", ".join(
        f"{name} {saved.get(name, 'missing')}, here {shapes.get(name, 'missing')}" for name in differing[:_N_SHOWN]
    )
    return f"{listed} and {len(differing) - _N_SHOWN} more" if len(differing) > _N_SHOWN else listed
