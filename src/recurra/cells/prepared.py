"""What the calls of a cell share, made once for a block of calls.

`torch.nn.utils.parametrize.cached()` does not serve: its values belong to all threads of a process, and a deep copy of
a module finds those of its original.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

T = TypeVar("T")


class _OfThisThread(threading.local):
    values: dict[object, tuple[Tensor, object]] | None = None
    """What was made, with the parameter that it was made from; None outside of every block."""


_open = _OfThisThread()


def cells_prepared_once() -> AbstractContextManager[None]:
    """Let every cell make what its calls share (an NCGRU's orthogonal matrix) once per `with` block, not once per call.

    The weights must not be changed in place inside. Gradients flow through what is shared as they would through each
    call. A block belongs to its thread; one inside another shares what that one has. It does nothing while
    torch.compile traces.
    """
    return nullcontext() if torch.compiler.is_compiling() else _block()


@contextmanager
def _block() -> Iterator[None]:
    outer = _open.values
    _open.values = {} if outer is None else outer
    try:
        yield
    finally:
        _open.values = outer


def made_once(cell: nn.Module, source: Tensor, make: Callable[[torch.dtype | None], T], dtype: torch.dtype | None) -> T:
    """Return `make(dtype)`, or what it made from `source` for this cell before, in the same block and gradient mode."""
    if torch.compiler.is_compiling() or _open.values is None:
        return make(dtype)
    key = cell, dtype, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    found = _open.values.get(key)
    if found is None or found[0] is not source:
        found = _open.values[key] = source, make(dtype)
    return cast(T, found[1])
