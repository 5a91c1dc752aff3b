"""Functions that kernels call by their address, so that they are compiled once.

Numba copies the code of every function that a kernel calls into the kernel, and optimises it there again: once for each
level of the tree of calls, and in each kernel. A large function called by address is optimised once. A call costs
nanoseconds more and cannot be inlined, so this is for functions that do much work.
"""

from collections.abc import Callable
from functools import cached_property
from inspect import signature
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from recurra.kernels.launch import compile_function


class Apart:
    """A function of whole numbers that returns one, compiled for callers that know its address.

    A caller takes the address as an argument, since it differs from process to process and code is kept on disk, and
    calls it with `call`.
    """

    def __init__(self, function: Callable[..., int]) -> None:
        self.__doc__ = function.__doc__
        self._compiled: Any = compile_function(function)
        self._types = (types.int64,) * len(signature(function).parameters)

    @cached_property
    def address(self) -> int:
        """Where the machine code is, which is compiled now if it is not on disk."""
        self._compiled.compile(self._types)
        compiled = self._compiled.overloads[self._types]
        return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name))


@intrinsic
def call(typing_context: Any, address: Any, arguments: Any) -> Any:
    """Call the function at an `Apart.address` with a tuple of whole numbers of 64 bits."""
    kinds = arguments.types if isinstance(arguments, types.BaseTuple) else ()
    if not kinds or not all(isinstance(kind, types.Integer) and kind.bitwidth == 64 for kind in kinds):
        return None

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        word = ir.IntType(64)
        kind = ir.FunctionType(word, [word] * len(kinds))
        function = builder.inttoptr(args[0], kind.as_pointer())
        return builder.call(function, [builder.extract_value(args[1], i) for i in range(len(kinds))])

    return types.int64(types.int64, arguments), generate
