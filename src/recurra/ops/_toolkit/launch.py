"""How a Numba kernel is compiled (lazily, cached on disk if possible) and run (in parallel if that is safe)."""

import threading
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from inspect import signature
from struct import Struct
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

import numba
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from recurra.ops._toolkit.cache import TolerantCache, digest_of_imports
from recurra.ops._toolkit.compiling import KernelCompiler, PartCompiler
from recurra.ops._toolkit.fork import is_forked_child

_parallel_kernels = threading.Lock()
_OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False}
_WORK_FOR_THREADS = 16_384  # for fewer numbers, starting threads costs more than it saves


def compile_function(function: Callable, **options: Any) -> Callable:
    """Compile `function` when it is first called, to run without the GIL; keep the machine code on disk if possible.

    Numba's cache on disk tells functions apart by file and name, and notices only changes in that file. So the name
    gets a hash of the other sources that the function imports. A caller that varies the options must vary the name.
    """
    function = _renamed(function, "_" + digest_of_imports(function))
    compiled = numba.njit(**_OPTIONS, pipeline_class=KernelCompiler, **options)(function)
    with suppress(RuntimeError):  # neither the folder of the source nor the user's cache can be written
        compiled._cache = TolerantCache(function)  # njit(cache=True) puts a FunctionCache there
    return compiled


def compile_part(function: Callable, **options: Any) -> Callable:
    """Compile a function that only kernels call, into each of them; of whole numbers, one form serves all values."""
    part = numba.njit(**_OPTIONS, pipeline_class=PartCompiler, **options)(function)
    compile_for = part.compile
    part.compile = lambda signature: compile_for(tuple(map(types.unliteral, signature)))
    return part


def compile_inline(function: Callable) -> Callable:
    """Compile a part of a kernel, which is inlined wherever it is called."""
    return compile_part(function, forceinline=True)


def _renamed(function: Callable, suffix: str) -> Callable:
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__doc__, copy.__qualname__ = function.__doc__, function.__qualname__ + suffix
    return copy


class Apart:
    """A function of whole numbers that returns one, compiled once for callers that know its address.

    Numba copies the code of every function that a kernel calls into the kernel, and optimises it there again: once for
    each level of the tree of calls, and in each kernel. A call by address costs nanoseconds more, so this is for
    functions that do much work. A caller takes the address as an argument, since it differs from process to process and
    code is kept on disk, and calls it with `call`.
    """

    def __init__(self, function: Callable[..., int]) -> None:
        self.__doc__ = function.__doc__
        self.compiled: Any = compile_function(function)
        self._types = (types.int64,) * len(signature(function).parameters)

    @cached_property
    def address(self) -> int:
        """Where the machine code is, which is compiled now if it is not on disk."""
        self.compiled.compile(self._types)
        result = self.compiled.overloads[self._types]
        return int(result.library.get_pointer_to_function(result.fndesc.llvm_cfunc_wrapper_name))


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


def _from_words(kinds: Sequence[types.Type]) -> Any:
    """Make the function that reads what a kernel takes, of these types, from words of 64 bits."""

    @intrinsic
    def read(typing_context: Any, words: Any, first: Any, last: Any) -> Any:
        pair = types.UniTuple(types.int64, 2)

        def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
            at, values = args[0], []
            for kind in kinds:
                is_tuple, numbers = isinstance(kind, types.BaseTuple), []
                for part in kind if is_tuple else (kind,):
                    place = builder.inttoptr(at, context.get_value_type(part).as_pointer())
                    numbers.append(builder.load(place, align=8))
                    at = builder.add(at, ir.Constant(at.type, 8))
                values.append(context.make_tuple(builder, kind, numbers) if is_tuple else numbers[0])
            values.append(context.make_tuple(builder, pair, args[1:]))
            return context.make_tuple(builder, sig.return_type, values)

        return types.Tuple((*kinds, pair))(words, first, last), generate

    return read


def _entry(function: Callable, arguments: tuple) -> Callable[[int, int, int], int]:
    """Write the function of the arguments' address, the first job and the last that calls a kernel's."""

    def run(words: int, first: int, last: int) -> int:
        function_of_jobs(*arguments_at(words, first, last))  # noqa: F821
        return 0

    kinds = [numba.typeof(int(x) if isinstance(x, bool) else x) for x in arguments]
    place, cells = function.__code__, [cell.cell_contents for cell in function.__closure__ or ()]
    # to Numba's cache on disk, it stands where the kernel does, and is told from the kernel's other forms by its name
    code = run.__code__.replace(co_filename=place.co_filename, co_firstlineno=place.co_firstlineno)
    names = {"function_of_jobs": compile_part(function), "arguments_at": _from_words(kinds)}
    entry = FunctionType(code, {"__name__": function.__module__, **names})
    form = sha256(repr((kinds, cells)).encode()).hexdigest()[:12]
    entry.__name__, entry.__qualname__ = function.__name__, f"{function.__qualname__}_{form}"
    return entry


def _shares(address, words, jobs, threads):  # type: ignore[no-untyped-def]
    for part in numba.prange(threads):
        call(address, (words, jobs * part // threads, jobs * (part + 1) // threads))


_launch = compile_function(_shares, parallel=True)


_Form: TypeAlias = tuple[Apart, Callable[[tuple], bytes]]  # a kernel for some types of arguments, and what packs these


class Kernel:
    """A loop over independent jobs, run by all threads or by one.

    One thread does little work, that of a forked child (GNU OpenMP kills a child that enters a parallel region), and
    work beside another thread in a parallel kernel (Numba's fall-back thread pool would abort). Both compute the same.

    Args:
        function: takes addresses, whole numbers, floats and tuples of whole numbers, and then `jobs`, the first job to
            do and the one to stop before.
    """

    def __init__(self, function: Callable) -> None:
        self.__doc__, self._function = function.__doc__, function
        self._forms: dict[tuple[type, ...], _Form] = {}

    def __call__(self, *arguments: Any, jobs: int, work: int) -> None:
        """Run `jobs` independent jobs that compute `work` numbers in all."""
        is_alone = work < _WORK_FOR_THREADS or jobs == 1 or is_forked_child()
        threads = 1 if is_alone else min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
        if threads == 1 or not _parallel_kernels.acquire(blocking=False):
            self._run(arguments, jobs, 1)
            return
        callers = numba.get_num_threads()  # the calling thread's own setting, for all that it runs with Numba
        try:
            if threads != callers:
                numba.set_num_threads(threads)
            self._run(arguments, jobs, threads)
        finally:
            if threads != callers:
                numba.set_num_threads(callers)
            _parallel_kernels.release()

    def _run(self, arguments: tuple, jobs: int, threads: int) -> None:
        form, pack = self._forms.get(kinds := tuple(map(type, arguments))) or self._form(kinds, arguments)
        words = array("q", pack(arguments))
        if threads == 1:
            form.compiled(words.buffer_info()[0], 0, jobs)
        else:
            _launch(form.address, words.buffer_info()[0], jobs, threads)

    def _form(self, kinds: tuple[type, ...], arguments: tuple) -> _Form:
        form = self._forms[kinds] = Apart(_entry(self._function, arguments)), _packer(arguments)
        return form


def _packer(arguments: tuple) -> Callable[[tuple], bytes]:
    """Make what writes the numbers of such arguments one after the other, 64 bits each, in a single expression."""
    places = {
        f"x[{i}][{j}]" if isinstance(one, tuple) else f"x[{i}]": number
        for i, one in enumerate(arguments)
        for j, number in enumerate(one if isinstance(one, tuple) else (one,))
    }
    letters = "".join("d" if isinstance(number, float) else "q" for number in places.values())
    packer: Callable[[tuple], bytes] = eval(f"lambda x: pack({', '.join(places)})", {"pack": Struct(letters).pack})
    return packer


class LoopKernel(Kernel):
    """A kernel that has its own `prange`, or takes arrays; it is compiled twice, for all threads and for one."""

    def __init__(self, function: Callable) -> None:
        super().__init__(function)
        self._serial = compile_function(function)
        self._parallel = compile_function(_renamed(function, "_parallel"), parallel=True)

    def _run(self, arguments: tuple, jobs: int, threads: int) -> None:
        (self._serial if threads == 1 else self._parallel)(*arguments)


class KernelPair(NamedTuple):
    """The kernels of an operator for one kind of number, forward and backward."""

    forward: Kernel
    backward: Kernel
