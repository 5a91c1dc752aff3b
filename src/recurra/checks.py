"""Checks of what comes in. All of them raise one kind of sentence: `<name> is <what was got>; expected <what fits>`.

`: <how to fix it>` follows where that helps. Configurations check themselves in `__post_init__`, so that they are the
same whether a recipe, a checkpoint or Python makes them; kernels check their tensors once, at the door, before they
take the first address.
"""

import math
from collections.abc import Hashable, Iterable, Mapping
from numbers import Integral
from typing import Any, Literal, TypeVar, get_origin, get_type_hints

import torch
from torch import Tensor

_Choice = TypeVar("_Choice")

_LONGEST = 800  # characters of what was got


def sentence(name: str, got: object, expected: str, hint: str = "") -> str:
    """Write the one sentence; `got` is taken as it is where it is a string, so quote values with repr().

    A value of a damaged file can have any length; its end is left out.
    """
    shown = str(got)
    if len(shown) > _LONGEST:
        shown = f"{shown[:_LONGEST]}..."
    return f"{name} is {shown}; expected {expected}{f': {hint}' if hint else ''}"


def require(condition: bool, name: str, value: object, expected: str, hint: str = "") -> None:
    """Raise ValueError with the one sentence unless `condition` holds."""
    if not condition:
        raise ValueError(sentence(name, repr(value), expected, hint))


def fields_of(config: object, section: str, *names: str) -> dict[str, Any]:
    """Collect fields of a config under the names that a recipe gives them, such as optimizer.learning_rate.

    Fields that are None are omitted: they were not set, so there is nothing to check.

    >>> fields_of(config, "training", "epochs", "max_steps")
    {'training.epochs': 3}
    """
    values = {f"{section}.{name}": getattr(config, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def require_whole_number(minimum: int, **values: object) -> None:
    """Refuse values that are not integers of at least `minimum`, by name; True and False are not integers here."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(sentence(name, f"{value!r}, {kind_of(value)}", "a whole number"))
        require(int(value) >= minimum, name, value, f"at least {minimum}")


def require_number(**values: object) -> None:
    """Refuse texts, lists, None and other values that cannot be compared with numbers, by name."""
    for name, value in values.items():
        try:
            bool(value >= 0)  # type: ignore[operator]
        except (TypeError, ValueError, RuntimeError):  # arrays and tensors of several numbers, too
            raise TypeError(sentence(name, f"{value!r}, {kind_of(value)}", "a number")) from None


def require_at_least(minimum: float, **values: float) -> None:
    """Refuse values below `minimum`, and infinity, by name."""
    require_number(**values)
    for name, value in values.items():
        require(value >= minimum, name, value, f"at least {minimum}")
        require(value != math.inf, name, value, "a finite number")


def require_probability(**values: float) -> None:
    """Refuse values outside [0, 1), by name: dropouts, where 1 would drop everything."""
    require_number(**values)
    for name, value in values.items():
        require(0 <= value < 1, name, value, "a probability in [0, 1)")


def require_share(**values: float) -> None:
    """Refuse values outside (0, 1], by name."""
    require_number(**values)
    for name, value in values.items():
        require(0 < value <= 1, name, value, "a share in (0, 1]")


def require_positive(**values: float) -> None:
    """Refuse values that are not finite numbers above 0, by name."""
    require_number(**values)
    for name, value in values.items():
        require(value > 0 and math.isfinite(value), name, value, "a finite number above 0")


def require_literal(literal: Any, **values: object) -> None:
    """Refuse values that are none of those of a `Literal`, by name."""
    for name, value in values.items():
        if value not in literal.__args__:  # what get_args returns, without the time of a look at kinds of annotations
            raise ValueError(_not_among(name, value, literal.__args__))


def require_literal_fields(config: object, section: str) -> None:
    """Refuse a config whose fields annotated with a `Literal` have other values, by the names of a recipe."""
    for name, kind in get_type_hints(type(config)).items():
        if get_origin(kind) is Literal:
            require_literal(kind, **{f"{section}.{name}": getattr(config, name)})


def choose(name: str, table: Mapping[Any, _Choice], choice: object) -> _Choice:
    """Look up the value of the option `name` in the table of its choices."""
    if not isinstance(choice, Hashable) or choice not in table:
        raise ValueError(_not_among(name, choice, table))
    return table[choice]


def _not_among(name: str, value: object, choices: Iterable[Any]) -> str:
    return sentence(name, repr(value), f"one of {', '.join(map(str, choices))}")


def require_heads(n_heads: int, **channels: int) -> None:
    """Refuse heads that do not divide the channels, by name."""
    require_whole_number(1, **channels, n_heads=n_heads)
    for name, size in channels.items():
        require(size % n_heads == 0, "n_heads", n_heads, f"a divisor of {name} = {size}")


def kind_of(value: object) -> str:
    """Describe a value for a message: a tensor by type, shape and device, anything else by its class."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_nested:
            return f"a {'nested' if value.is_nested else str(value.layout).removeprefix('torch.')} tensor"
        return f"{_dtype(value.dtype)} {tuple(value.shape)} on {value.device}"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def require_tensor(name: str, value: object) -> None:
    """Refuse what is not a tensor, and sparse and nested ones."""
    if not isinstance(value, Tensor):
        raise TypeError(sentence(name, kind_of(value), "a torch.Tensor"))
    if value.layout is not torch.strided or value.is_nested:
        hint = f"use {name}.to_dense(), or for a nested one {name}.to_padded_tensor(0) and a mask"
        raise TypeError(sentence(name, kind_of(value), "a dense tensor", hint))


def require_numbers(name: str, tensor: Tensor, like: Tensor) -> None:
    """Refuse a meta tensor, which has a shape alone, beside weights `like` that have numbers."""
    if tensor.device.type == "meta" and like.device.type != "meta":
        raise ValueError(sentence(name, kind_of(tensor), f"a tensor on {like.device}, as the weights"))


def require_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape."""
    require_tensor(name, tensor)
    if tensor.shape != shape:
        raise ValueError(sentence(name, kind_of(tensor), f"shape {tuple(shape)}"))


def require_layout(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, hint: str = ""
) -> None:
    """Refuse a tensor of another shape, type or device: what a kernel asks before it takes an address."""
    fits = isinstance(tensor, Tensor) and tensor.shape == shape and tensor.dtype == dtype and tensor.device == device
    if not fits:
        raise ValueError(sentence(name, kind_of(tensor), f"{_dtype(dtype)} {tuple(shape)} on {device}", hint))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
