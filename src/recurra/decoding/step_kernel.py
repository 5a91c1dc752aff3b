"""The loop that runs a compiled step: one call from Python, all of a token's instructions (see `instructions`).

Matrices are shared between all threads; everything else is a few thousand numbers in the cache and runs on the calling
thread. Each row of a matrix costs the time to read it, so the rows are divided evenly.
"""

from functools import cache

from numba import prange

from recurra.decoding.instructions import (
    BASES,
    KIND,
    KINDS,
    LINEAR,
    LOOK_UP,
    MAP,
    OFFSETS,
    OPCODE,
    OUT,
    SIZES,
    STRIDES,
    WORDS,
    A,
    B,
    C,
    D,
)
from recurra.decoding.matvec_kernels import multiply_rows, rows_of
from recurra.decoding.vector_math import apply, gather, number, quotient, root, scatter, set_word, spread, word
from recurra.kernels.launch import Kernel, compile_function, compile_inline
from recurra.kernels.vector import WIDTH, Lanes, load, store, total, zeros

SPLIT_FROM = 16_384
"""Minimum number of weights for which a matrix's rows are shared between threads."""

_FLOATS, _ONE = Lanes("float32", WIDTH), Lanes("float32", 1)
_FLOAT32, _BFLOAT16, _INT8 = (rows_of(name) for name in KINDS)
_F_WEIGHTS, _F_WEIGHT, _F_AHEAD = _FLOAT32
_B_WEIGHTS, _B_WEIGHT, _B_AHEAD = _BFLOAT16
_I_WEIGHTS, _I_WEIGHT, _I_AHEAD = _INT8
_IS_FLOAT32, _IS_BFLOAT16 = KINDS["float32"], KINDS["bfloat16"]


@compile_inline
def _place(row, bases, operand):  # type: ignore[no-untyped-def]
    """Address of an operand."""
    return word(bases, word(row, BASES + operand)) + word(row, OFFSETS + operand)


@compile_inline
def _take(address, stride):  # type: ignore[no-untyped-def]
    if stride == 4:
        return load(address, 0, _FLOATS)
    return gather(address, stride, _FLOATS)


@compile_function
def _linear(row, bases, job, jobs):  # type: ignore[no-untyped-def]
    """The share of one job in a matrix's rows."""
    w, scale, bias = _place(row, bases, B), _place(row, bases, C), _place(row, bases, D)
    x, y = _place(row, bases, A), _place(row, bases, OUT)
    vectors, n_in, n_out = word(row, SIZES), word(row, SIZES + 1), word(row, SIZES + 2)
    span = (n_out + jobs - 1) // jobs
    first, last = job * span, min(n_out, (job + 1) * span)
    kind = word(row, KIND)
    if kind == _IS_FLOAT32:
        multiply_rows(w, scale, bias, x, y, vectors, n_in, n_out, first, last, 4, _F_AHEAD, _F_WEIGHTS, _F_WEIGHT)
    elif kind == _IS_BFLOAT16:
        multiply_rows(w, scale, bias, x, y, vectors, n_in, n_out, first, last, 2, _B_AHEAD, _B_WEIGHTS, _B_WEIGHT)
    else:
        multiply_rows(w, scale, bias, x, y, vectors, n_in, n_out, first, last, 1, _I_AHEAD, _I_WEIGHTS, _I_WEIGHT)


@compile_inline
def _stretch(function, out, a, b, n, out_by, a_by, b_by):  # type: ignore[no-untyped-def]
    """The innermost dimension of a MAP."""
    i = 0
    while i + WIDTH <= n:
        result = apply(function, _take(a + i * a_by, a_by), _take(b + i * b_by, b_by))
        if out_by == 4:
            store(out + i * out_by, 0, _FLOATS, result)
        else:
            scatter(out + i * out_by, out_by, _FLOATS, result)
        i += WIDTH
    while i < n:
        store(out + i * out_by, 0, _ONE, apply(function, load(a + i * a_by, 0, _ONE), load(b + i * b_by, 0, _ONE)))
        i += 1


@compile_function
def _map(row, bases):  # type: ignore[no-untyped-def]
    out, a, b = _place(row, bases, OUT), _place(row, bases, A), _place(row, bases, B)
    function, sizes = word(row, KIND), row + 8 * SIZES
    out_by, a_by, b_by = row + 8 * STRIDES, row + 8 * (STRIDES + 4), row + 8 * (STRIDES + 8)
    for i in range(word(sizes, 3)):
        out_1, a_1, b_1 = out + i * word(out_by, 3), a + i * word(a_by, 3), b + i * word(b_by, 3)
        for j in range(word(sizes, 2)):
            out_2, a_2, b_2 = out_1 + j * word(out_by, 2), a_1 + j * word(a_by, 2), b_1 + j * word(b_by, 2)
            for k in range(word(sizes, 1)):
                _stretch(
                    *(function, out_2 + k * word(out_by, 1), a_2 + k * word(a_by, 1), b_2 + k * word(b_by, 1)),
                    *(word(sizes, 0), word(out_by, 0), word(a_by, 0), word(b_by, 0)),
                )


@compile_function
def _normalise(row, bases):  # type: ignore[no-untyped-def]
    weight, bias, small = _place(row, bases, B), _place(row, bases, C), load(_place(row, bases, D), 0, _ONE)
    rows, n = word(row, SIZES), word(row, SIZES + 1)
    count = number(n, _ONE)
    for r in range(rows):
        x, y = _place(row, bases, A) + 4 * r * n, _place(row, bases, OUT) + 4 * r * n
        sums, rest, i = zeros(_FLOATS), zeros(_ONE), 0
        while i + WIDTH <= n:
            sums = sums + load(x, i, _FLOATS)
            i += WIDTH
        while i < n:
            rest = rest + load(x, i, _ONE)
            i += 1
        mean = quotient(total(sums) + rest, count)
        means = spread(mean, _FLOATS)
        sums, rest, i = zeros(_FLOATS), zeros(_ONE), 0
        while i + WIDTH <= n:
            sums = sums + (load(x, i, _FLOATS) - means) * (load(x, i, _FLOATS) - means)
            i += WIDTH
        while i < n:
            rest = rest + (load(x, i, _ONE) - mean) * (load(x, i, _ONE) - mean)
            i += 1
        width = root(quotient(total(sums) + rest, count) + small)
        widths, i = spread(width, _FLOATS), 0
        while i + WIDTH <= n:
            scaled = quotient(load(x, i, _FLOATS) - means, widths)
            store(y, i, _FLOATS, scaled * load(weight, i, _FLOATS) + load(bias, i, _FLOATS))
            i += WIDTH
        while i < n:
            scaled_one = quotient(load(x, i, _ONE) - mean, width)
            store(y, i, _ONE, scaled_one * load(weight, i, _ONE) + load(bias, i, _ONE))
            i += 1


@compile_function
def _look_up(row, bases):  # type: ignore[no-untyped-def]
    """Copy rows; tell whether all exist."""
    at, table, out = _place(row, bases, A), _place(row, bases, B), _place(row, bases, OUT)
    width = word(row, SIZES + 1)
    for r in range(word(row, SIZES)):
        chosen = word(at, r)
        if chosen < 0 or chosen >= word(row, SIZES + 2):
            return False
        for i in range(width):
            store(out, r * width + i, _ONE, load(table, chosen * width + i, _ONE))
    return True


@cache
def step_kernel() -> Kernel:
    """Give the kernel of (table, instructions, bases, missing, jobs), addresses and counts.

    `jobs` is the number of parts that a matrix is divided into. `missing` becomes 1 if a run ends at a row that does
    not exist.
    """

    def run_step(table, instructions, bases, missing, jobs):  # type: ignore[no-untyped-def]
        for at in range(instructions):
            row = table + 8 * WORDS * at
            opcode = word(row, OPCODE)
            if opcode == LINEAR:
                if jobs == 1 or word(row, SIZES + 1) * word(row, SIZES + 2) < SPLIT_FROM:
                    _linear(row, bases, 0, 1)
                else:
                    for job in prange(jobs):
                        _linear(row, bases, job, jobs)
            elif opcode == MAP:
                _map(row, bases)
            elif opcode == LOOK_UP:
                if not _look_up(row, bases):
                    set_word(missing, 1)
                    return
            else:
                _normalise(row, bases)

    return Kernel(run_step)
