"""Calls of kernels with the memory that they read and wrote."""

import ctypes
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numba
import torch
from torch import Tensor

from recurra.ops._toolkit.launch import Apart, Kernel, compile_function

_LEAST_ADDRESS = 1 << 32  # sizes and strides are smaller


@dataclass
class Region:
    """A tensor's memory before and after a call."""

    address: int
    dtype: torch.dtype
    before: bytes
    after: bytes = b""


@dataclass
class Call:
    """One call of a kernel: its LLVM code, flat arguments, and the code of functions whose addresses are among them."""

    kernel: str
    code: str
    arguments: list[int]
    regions: list[Region]
    functions: dict[int, str]


def _flat(arguments: Iterable[Any]) -> Iterator[int]:
    for argument in arguments:
        if isinstance(argument, (tuple, list)):
            yield from _flat(argument)
        else:
            yield int(argument)


def _bytes_at(address: int, count: int) -> bytes:
    return ctypes.string_at(address, count)


def _regions(addresses: list[int]) -> list[Region]:
    """The storages of live tensors that these addresses point into."""
    found: dict[int, Region] = {}
    for tensor in (thing for thing in gc.get_objects() if type(thing) in (Tensor, torch.nn.Parameter)):
        storage = tensor.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        if size and any(start <= address <= start + size for address in addresses):
            found[start] = Region(start, tensor.dtype, _bytes_at(start, size))
    for address in addresses:
        if not any(start <= address <= start + len(region.before) for start, region in found.items()):
            raise RuntimeError(f"address {address:#x} belongs to no tensor")
    return list(found.values())


def _functions(numbers: list[int]) -> dict[int, str]:
    """The code of the functions whose addresses are among these numbers."""
    aparts: list[Any] = [thing for thing in gc.get_objects() if type(thing) is Apart]
    known = {apart.address: apart for apart in aparts if "address" in vars(apart)}
    return {number: known[number].compiled.inspect_llvm(known[number]._types) for number in numbers if number in known}


@contextmanager
def record(calls: list[Call]) -> Iterator[None]:
    """Add to `calls` what kernels are called with; they run on this machine meanwhile."""
    plain: Callable[..., None] = Kernel.__call__

    def call(self: Kernel, *arguments: Any, jobs: int, work: int) -> None:
        arguments = (*arguments, (0, jobs))
        flat = list(_flat(arguments))
        functions = _functions(flat)
        regions = _regions([number for number in flat if number >= _LEAST_ADDRESS and number not in functions])
        function: Any = compile_function(self._function)
        function(*arguments)
        for region in regions:
            region.after = _bytes_at(region.address, len(region.before))
        types = tuple(numba.typeof(argument) for argument in arguments)
        name = f"{function.__module__.removeprefix('recurra.')}: {function.py_func.__name__}"
        calls.append(Call(name, function.inspect_llvm(types), flat, regions, functions))

    Kernel.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        Kernel.__call__ = plain  # type: ignore[method-assign]
