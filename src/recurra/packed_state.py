"""A recurrent state as plain data: what a checkpoint holds, and the way back."""

from typing import Any

import torch
from torch import Tensor, nn

from recurra.state import tensors


def pack_state(state: Any) -> Any:
    """Turn a state into nested lists of tensors, numbers and None: plain data, bound to no class of this
    package."""
    if isinstance(state, (tuple, list)):
        return [pack_state(item) for item in state]
    return state.detach() if isinstance(state, Tensor) else state


def unpack_state(packed: Any, model: nn.Module, example: Tensor | None = None) -> Any:
    """Give packed data the structure of the states of `model`, its tensors on the model's device.

    Args:
        packed: what `pack_state` made of a state, None included.
        model: called as `model(inputs, state)`; it reads an input to show what its states look like.
        example: that input, with at least as many rows as the state; None: one token in each row.

    Raises:
        ValueError: the data does not fit that structure.
    """
    if packed is None:
        return None
    rows = next((tensor.shape[0] for tensor in tensors(packed)), 1)
    inputs = torch.zeros(rows, 1, dtype=torch.int64) if example is None else example[:rows]
    like = _example_state(model, inputs.to(next(model.parameters()).device))
    return _rebuild(packed, like, where="state")


def _example_state(model: nn.Module, inputs: Tensor) -> Any:
    was_training = model.training
    model.eval()
    with torch.no_grad():
        _, state = model(inputs, None)
    model.train(was_training)
    return state


def _rebuild(packed: Any, like: Any, where: str) -> Any:
    if isinstance(like, (tuple, list)) and isinstance(packed, list) and len(like) == len(packed):
        names = getattr(like, "_fields", range(len(like)))
        items = [_rebuild(part, example, f"{where}.{name}") for part, example, name in zip(packed, like, names)]
        return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)
    if isinstance(like, Tensor) and isinstance(packed, Tensor):
        if (packed.ndim, packed.shape[:1], packed.dtype) == (like.ndim, like.shape[:1], like.dtype):
            return packed.to(like.device)
    elif not isinstance(like, (Tensor, tuple, list)) and not isinstance(packed, (Tensor, list)):
        return packed
    raise ValueError(
        f"the saved recurrent state does not fit the model's: {where} is {_kind(packed)} against {_kind(like)}"
    )


def _kind(item: Any) -> str:
    if isinstance(item, Tensor):
        return f"{item.dtype} {tuple(item.shape)}"
    return f"{len(item)} parts" if isinstance(item, (tuple, list)) else repr(item)
