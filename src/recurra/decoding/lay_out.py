"""A model with its linear layers laid out for decoding; everything around them is the model's own."""

import copy
from typing import TypeVar

from torch import nn

from recurra.checks import require_choice
from recurra.decoding.linear import NUMBERS, DecodingLinear

Model = TypeVar("Model", bound=nn.Module)


def lay_out_linear_layers(model: Model, numbers: str = "float32") -> Model:
    """Copy `model`, in evaluation mode, with a `DecodingLinear` in place of each `nn.Linear`.

    The copy takes the same arguments and has the same states. Everything that is not an `nn.Linear` (embeddings, norms,
    recurrent cells, the clusters of an adaptive softmax) stays float32 and shares its memory with the model. So does
    what is in a module with `needs_exact_weights`.

    Args:
        model: a float32 model on the CPU.
        numbers: how to keep weights: "float32", "bfloat16", "int8" or "int4".

    Raises:
        ValueError: `numbers` is none of these, or a linear layer is not float32 on the CPU.
    """
    require_choice(NUMBERS, numbers=numbers)
    # A memo that maps each tensor to itself keeps deepcopy from copying them.
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, memo=shared)
    exact = exact_modules(twin)
    for parent in list(twin.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear and child not in exact:
                setattr(parent, name, DecodingLinear(child, numbers))
    return twin.eval()


def exact_modules(model: nn.Module) -> set[nn.Module]:
    """Find the modules whose weights must not be rounded: small ones, of whose rounding a model makes much more."""
    exact = [module for module in model.modules() if getattr(module, "needs_exact_weights", False)]
    return {part for module in exact for part in module.modules()}
