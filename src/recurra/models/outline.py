"""Models in outline: shapes without values, on PyTorch's device `meta`, where tensors take no memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_WRITERS = {Tensor.normal_, Tensor.uniform_, Tensor.zero_, Tensor.fill_}
_WRITERS |= {function for name, function in vars(nn.init).items() if name.endswith("_") and name[0] != "_"}


@contextmanager
def outlined() -> Iterator[None]:
    """Make models without memory for their weights, and without drawing any.

    `torch.device("meta")` alone does the former. A draw there changes nothing, but PyTorch takes a millisecond to find
    that out: more than half of the time to outline a model of many layers.
    """
    with torch.device("meta"), _Undrawn():
        yield


class _Undrawn(TorchFunctionMode):
    """Leaves tensors on `meta` alone that are to be filled in place, and makes those of linspace there.

    transformers replaces torch.linspace while it loads a model. If torch.device is a context for the first time then,
    torch no longer knows linspace as one of the functions that make tensors.
    """

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _WRITERS:
            tensor: Tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        if function is torch.linspace:
            kwargs = {"device": "meta", **kwargs}
        return function(*args, **kwargs)
