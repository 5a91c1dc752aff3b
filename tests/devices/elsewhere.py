"""A device of PyTorch's beside the CPU, without one: its tensors have numbers, and refuse to meet the CPU's.

Whatever is asked of them is computed on the CPU by PyTorch's own operators. What makes it a device is what it refuses:
an operator with tensors of both, as a card refuses them. `register` is for a whole process, so tests run what uses this
in a process of its own.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration

NAME = "elsewhere"
DEVICE = f"{NAME}:0"


class _Module(backend_registration._DummyBackendModule):
    """What torch.autocast asks a device for."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def is_autocast_enabled(self) -> bool:
        return False


_LIBRARY = torch.library.Library("_", "IMPL")


def register() -> None:
    """Make the device known to this process, once."""
    # The autograd engine starts a thread for each device known at its first use; devices in Python do not survive that.
    torch.ones((), requires_grad=True).backward()
    torch.autograd.set_multithreading_enabled(False)
    torch.__future__.set_swap_module_params_on_conversion(True)  # a parameter that two modules share stays one
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    _LIBRARY.fallback(_compute, "PrivateUse1")  # for what makes tensors there out of none


class There(Tensor):
    """A tensor on the device, and the one on the CPU that has its numbers."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "There":
        numbers = numbers.resolve_conj().resolve_neg()
        like = {"strides": numbers.stride(), "storage_offset": numbers.storage_offset(), "dtype": numbers.dtype}
        with torch.inference_mode(numbers.is_inference()):  # in it, a view of a tensor from outside is as its base
            there = Tensor._make_wrapper_subclass(cls, numbers.shape, device=DEVICE, **like)
        there.numbers = numbers
        return there

    def __repr__(self) -> str:
        return f"There({self.numbers})"

    def tolist(self) -> list:
        """What torch refuses to subclasses."""
        return self.numbers.tolist()

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _compute(operator, *args, **(kwargs or {}))


def _compute(operator: Any, *args: Any, **kwargs: Any) -> Any:
    there: list[There] = []
    strangers: list[Tensor] = []

    def here(value: Any) -> Any:
        if isinstance(value, There):
            there.append(value)
            return value.numbers
        if isinstance(value, (list, tuple)):
            return type(value)(map(here, value))
        if isinstance(value, Tensor) and value.ndim:  # a number may come from anywhere
            strangers.append(value)
        return value

    args, kwargs = here(args), {name: here(value) for name, value in kwargs.items()}
    device = kwargs.get("device")
    goes_there = device is not None and torch.device(device).type == NAME
    if not there and not goes_there:
        return operator(*args, **kwargs)
    name = operator._schema.name
    if there and strangers and name != "aten::copy_":  # which goes from one device to another
        raise RuntimeError(f"{name}: {DEVICE} beside tensors on the CPU of shapes {[x.shape for x in strangers]}")
    if device is not None:
        kwargs["device"] = torch.device("cpu")
    found = operator(*args, **kwargs)
    if device is not None and not goes_there:
        return found
    written = {id(x.numbers): x for x in there}  # an operator that works in place returns what it was given

    def out(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(out, value))
        if isinstance(value, Tensor):
            return written[id(value)] if id(value) in written else There(value)
        return value

    return out(found)
