"""A model with its linear layers packed for inference; the modules around them, and so the steps, are its own."""

import copy
from typing import TypeVar

from torch import nn

from recurra.decoding.packed_linear import NUMBERS, PackedLinear

Model = TypeVar("Model", bound=nn.Module)


def pack_linear_layers(model: Model, numbers: str = "float32") -> Model:
    """Make a copy of `model` in evaluation mode whose `nn.Linear` layers are `PackedLinear`.

    The copy is called as the model is and its states are the model's. Embeddings, norms and whatever else is no
    `nn.Linear` (the clusters of an adaptive softmax, recurrent cells) stay float32; nothing that stays is copied.

    Args:
        model: float32, on the CPU.
        numbers: what weights are kept as: "float32", "bfloat16" or "int8".

    Raises:
        ValueError: there are no such numbers, or the model is not float32 on the CPU.
    """
    if numbers not in NUMBERS:
        raise ValueError(f"numbers is {numbers!r}; expected one of {', '.join(NUMBERS)}")
    # Tensors are shared with the model: a memo that maps each to itself keeps deepcopy from copying them.
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, memo=shared).eval()
    for parent in list(twin.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child, numbers))
    return twin
