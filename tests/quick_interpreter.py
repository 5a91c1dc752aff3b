"""Triton's interpreter without the work that it repeats in every operation: half of its time. Results are the same.

Of many cases, a sample goes through it by default, and all of them on a card.

It makes the language ready at each call of a function, and for each tensor a type with a shape of constants. Here that
happens once per function, type and shape. It looks for overflows of integers by some ten operations of its own; here
NumPy does.
"""

import operator
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
NUMBER, TOLERANCE = (torch.float64, 1e-13) if INTERPRETED else (torch.float32, 2e-5)
"""Numbers are float64 in the interpreter, which the kernels themselves can do, and float32 on a card."""


def sampled(cases: Iterable[tuple], quick: Callable[..., bool]) -> list:
    """The cases of a test, of which the interpreter takes those that are not quick only where slow tests run."""
    slow = pytest.mark.slow if INTERPRETED else ()
    return [pytest.param(*case, marks=() if quick(*case) else slow) for case in cases]


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Remember what the interpreter computes again and again."""
    from triton import language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    prepared = set()

    def call(self, *arguments, **named):
        if not (self.fn.__module__.startswith("recurra.") or self.fn in prepared):
            interpreter._patch_lang(self.fn)
            prepared.add(self.fn)
        return self.rewrite()(*arguments, **named)

    number_of, number_known = interpreter._get_np_dtype, {}

    def number(of):
        name = of.scalar.name
        if name not in number_known:
            number_known[name] = number_of(of)
        return number_known[name]

    begin_type, types = tl.block_type.__init__, {}

    def type_of_block(self, element_ty, shape):
        sizes = [size.value if isinstance(size, tl.constexpr) else size for size in shape]
        key = (element_ty.name, *sizes)
        if key not in types:
            begin_type(self, element_ty, shape)
            types[key] = dict(self.__dict__)
        self.__dict__.update(types[key])

    begin_tensor, shapes = tl.tensor.__init__, {}

    def tensor(self, handle, type):
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            begin_tensor(self, handle, type)
            shapes[key] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[key]

    def are_alike(lhs, rhs):  # blocks of one type and one size share their shape, by `type_of_block`
        return all(isinstance(x, tl.tensor) and x.type.is_block() for x in (lhs, rhs)) and (
            lhs.type.shape is rhs.type.shape
        )

    broadcast, convert = TritonSemantic.broadcast_impl_value, TritonSemantic.binary_op_type_checking_impl

    def broadcast_unlike(self, lhs, rhs):
        return (lhs, rhs) if are_alike(lhs, rhs) else broadcast(self, lhs, rhs)

    def convert_unlike(self, lhs, rhs, *rules, **named):
        is_quotient = any(rules[3:]) or named.get("div_or_mod")  # of halves, it is in float32
        return (lhs, rhs) if are_alike(lhs, rhs) and not is_quotient else convert(self, lhs, rhs, *rules, **named)

    def in_range(self, lhs, rhs, binary_op):
        of = lhs.type.scalar
        if of.int_bitwidth < 64:
            compute = getattr(operator, binary_op.__name__)
            exact = compute(lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
            least, most = of.get_int_min_value(), of.get_int_max_value()
            fits = least <= exact.min() <= exact.max() <= most
            assert fits, f"{of} overflows in {binary_op.__name__}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        patch.setattr(interpreter, "_get_np_dtype", number)
        patch.setattr(tl.block_type, "__init__", type_of_block)
        patch.setattr(tl.tensor, "__init__", tensor)
        patch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_unlike)
        patch.setattr(TritonSemantic, "binary_op_type_checking_impl", convert_unlike)
        patch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", in_range)
        yield
