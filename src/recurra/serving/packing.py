"""A state as bytes, for the memory and the disk: one block, without the overhead of many small tensors."""

import json
from typing import Any

import torch
from safetensors import torch as safetensors
from torch import Tensor, nn

from recurra.saved_state import fill_in, name_tensors, state_from_plain, state_to_plain

_STRUCTURE = "structure"


def pack(state: Any) -> bytes:
    """Give a state as the bytes of a safetensors file."""
    tensors: dict[str, Tensor] = {}
    structure = name_tensors(state_to_plain(state), tensors)
    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    tensors[_STRUCTURE] = torch.frombuffer(bytearray(json.dumps(structure).encode()), dtype=torch.uint8)
    return bytes(safetensors.save(tensors))


def unpack(packed: bytes, model: nn.Module) -> Any:
    """Give back a state of `model`. Raises ValueError if the bytes hold none."""
    try:
        # copies, each in its own memory: views would keep the bytes of all alive
        tensors = {name: tensor.clone() for name, tensor in safetensors.load(packed).items()}
        structure = json.loads(tensors.pop(_STRUCTURE).numpy().tobytes())
        return state_from_plain(fill_in(structure, tensors), model)
    except Exception as error:  # safetensors has errors of its own
        raise ValueError(f"a saved state cannot be read: {error}") from error
