"""How a Numba kernel is compiled (lazily, cached on disk if possible) and run (in parallel if that is safe)."""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from inspect import signature
from types import FunctionType
from typing import Any, NamedTuple

import numba
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from recurra.ops._toolkit.cache import TolerantCache, digest_of_imports
from recurra.ops._toolkit.fork import is_forked_child

_parallel_kernels = threading.Lock()
_WORK_FOR_THREADS = 16_384  # for fewer numbers, starting threads costs more than it saves


def compile_function(function: Callable, **options: Any) -> Callable:
    """Compile `function` when it is first called, to run without the GIL; keep the machine code on disk if possible.

    Numba's cache on disk tells functions apart by file and name, and notices only changes in that file. So the name
    gets a hash of the other sources that the function imports. A caller that varies the options must vary the name.
    """
    function = _renamed(function, "_" + digest_of_imports(function))
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False, **options}
    compiled = numba.njit(**options)(function)
    with suppress(RuntimeError):  # neither the folder of the source nor the user's cache can be written
        compiled._cache = TolerantCache(function)  # njit(cache=True) puts a FunctionCache there
    return compiled


def compile_inline(function: Callable) -> Callable:
    """Compile a part of a kernel, which is inlined wherever it is called."""
    return compile_function(function, forceinline=True)


def _renamed(function: Callable, suffix: str) -> Callable:
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__doc__, copy.__qualname__ = function.__doc__, function.__qualname__ + suffix
    return copy


class Kernel:
    """A loop over independent jobs, compiled twice: for all threads, and for one.

    The serial form runs for little work, in a forked child (GNU OpenMP kills a child that enters a parallel region),
    and while another thread is in a parallel kernel (Numba's fall-back thread pool would abort). Both compute the same.
    """

    def __init__(self, function: Callable) -> None:
        self.__doc__ = function.__doc__
        self._serial = compile_function(function)
        self._parallel = compile_function(_renamed(function, "_parallel"), parallel=True)

    def __call__(self, *arguments: Any, jobs: int, work: int) -> None:
        """Run the kernel, whose outer loop has `jobs` independent jobs that compute `work` numbers in all."""
        is_alone = work < _WORK_FOR_THREADS or jobs == 1 or is_forked_child()
        threads = 1 if is_alone else min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
        if threads == 1 or not _parallel_kernels.acquire(blocking=False):
            self._serial(*arguments)
            return
        callers = numba.get_num_threads()  # the calling thread's own setting, for all that it runs with Numba
        try:
            if threads != callers:
                numba.set_num_threads(threads)
            self._parallel(*arguments)
        finally:
            if threads != callers:
                numba.set_num_threads(callers)
            _parallel_kernels.release()


class KernelPair(NamedTuple):
    """The kernels of an operator for one kind of number, forward and backward."""

    forward: Kernel
    backward: Kernel


class Apart:
    """A function of whole numbers that returns one, compiled once for callers that know its address.

    Numba copies the code of every function that a kernel calls into the kernel, and optimises it there again: once for
    each level of the tree of calls, and in each kernel. A call by address costs nanoseconds more, so this is for
    functions that do much work. A caller takes the address as an argument, since it differs from process to process and
    code is kept on disk, and calls it with `call`.
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
