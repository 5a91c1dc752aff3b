"""A recurrent state as plain data: what a checkpoint holds, and the way back."""

from typing import Any

import torch
from torch import Tensor, nn

from recurra.checks import kind_of
from recurra.state import tensors

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


def state_to_plain(state: Any) -> Any:
    """Turn a state into nested lists of tensors, numbers and None: plain data, bound to no class of this package."""
    if isinstance(state, (tuple, list)):
        return [state_to_plain(item) for item in state]
    return state.detach() if isinstance(state, Tensor) else state


def state_from_plain(plain: Any, model: nn.Module) -> Any:
    """Rebuild a state of `model` from plain data, its tensors on the model's device.

    Args:
        plain: what `state_to_plain` made of a state, None included.
        model: has `initial_state(batch)`, which shows what its states look like, and `require_state(state, batch)`,
            which refuses what it could not have returned.

    Raises:
        TypeError, ValueError: the data do not fit that structure, or `require_state` refuses the state.
    """
    if plain is None:
        return None
    batch = next((tensor.shape[0] for tensor in tensors(plain) if tensor.dim()), 1)
    # Of one stream, however many are saved: a file must not say how much is allocated.
    state = _rebuild(plain, model.initial_state(1), where="state")  # type: ignore[operator]
    model.require_state(state, batch)  # type: ignore[operator]
    return state


def _rebuild(plain: Any, like: Any, where: str) -> Any:
    if isinstance(like, (tuple, list)) and isinstance(plain, list) and len(like) == len(plain):
        names = getattr(like, "_fields", range(len(like)))
        items = [_rebuild(part, example, f"{where}.{name}") for part, example, name in zip(plain, like, names)]
        return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)
    if isinstance(like, Tensor) and isinstance(plain, Tensor):
        return plain.to(like.device)
    if type(plain) is type(like) and not isinstance(like, (Tensor, tuple, list)):
        return plain
    raise ValueError(f"{where} is {_described(plain)} in the saved state; expected {_described(like)}, as in the model")


def _described(item: Any) -> str:
    return f"a list of {len(item)}" if isinstance(item, (tuple, list)) else kind_of(item)


def name_tensors(packed: Any, tensors: dict[str, Tensor]) -> Any:
    """Give a packed state's structure as JSON: each leaf becomes a name in `tensors`, where its value is put."""
    if isinstance(packed, list):
        return [name_tensors(item, tensors) for item in packed]
    if packed is None:
        return None
    name = f"state.{sum(key.startswith('state.') for key in tensors)}"
    if not isinstance(packed, Tensor):
        tensors[name] = torch.tensor(packed, dtype=_NUMBERS[type(packed)], device="cpu")
        return {"number": name}
    if packed.is_complex():  # the format has no complex128
        tensors[name] = torch.view_as_real(packed.resolve_conj())
        return {"complex": name}
    tensors[name] = packed
    return {"tensor": name}


def fill_in(structure: Any, tensors: dict[str, Tensor]) -> Any:
    """Give back the packed state whose structure and tensors `name_tensors` gave."""
    if isinstance(structure, list):
        return [fill_in(item, tensors) for item in structure]
    if structure is None:
        return None
    ((kind, name),) = structure.items()
    if kind == "number":
        return tensors[name].item()
    return torch.view_as_complex(tensors[name]) if kind == "complex" else tensors[name]
