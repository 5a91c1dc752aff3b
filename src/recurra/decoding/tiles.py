"""The inner loops of a product of bfloat16 weights: 64 outputs of a few vectors at once, their sums in registers.

A block of weights is (inputs, 64): those of one input for 64 neighbouring outputs lie side by side, and each is
multiplied by one number of every vector. So a weight is loaded and widened once for all vectors of a tile, and a sum
runs through the inputs in order, whichever tile it is in. A tile adds its sums to `sums` (vectors, 64).

A tile has as many sums as registers hold: 6 vectors of 64 outputs in 24 of the 32 registers of AVX-512, of 16 outputs
in 12 of the 16 of AVX2.
"""

import llvmlite.binding
import numba

from recurra.decoding.panels import PANEL
from recurra.kernels.launch import compile_function, compile_inline
from recurra.kernels.vector import WIDTH, Lanes, load, multiply_add, prefetch, spread, store, zeros


def has_wide_registers() -> bool:
    """Tell whether kernels are compiled for 32 registers of 16 floats."""
    chosen = numba.config.CPU_FEATURES
    if chosen is None and numba.config.CPU_NAME is None:
        return bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
    return "+avx512f" in (chosen or "")


_SIX = PANEL if has_wide_registers() else WIDTH
_TWO = PANEL if has_wide_registers() else 2 * WIDTH
_ONE, _FLOATS = Lanes("float32", 1), Lanes("float32", PANEL)
_SUMS_6, _SUMS_2 = Lanes("float32", _SIX), Lanes("float32", _TWO)
FLOAT32_6, FLOAT32_2, FLOAT32_1 = _SUMS_6, _SUMS_2, _FLOATS
BFLOAT16_6, BFLOAT16_2, BFLOAT16_1 = (Lanes("bfloat16", width) for width in (_SIX, _TWO, PANEL))


@compile_inline
def number_of(x, k, lanes):  # type: ignore[no-untyped-def]
    """Give number k of a vector in all lanes."""
    return spread(load(x, k, _ONE), lanes)


@compile_inline
def add_to(sums, at, more, lanes):  # type: ignore[no-untyped-def]
    """Add a vector to the sums from number `at` on."""
    store(sums, at, lanes, load(sums, at, lanes) + more)


@compile_inline
def six(w, x, n_in, sums, count, fetch, step, block, weights):  # type: ignore[no-untyped-def]
    """Multiply `count` inputs of a block by 6 vectors, and keep the widened weights in `block`, unless that is 0.

    For each input, `step` bytes from `fetch` on are fetched.
    """
    x1, x2, x3, x4, x5 = x + 4 * n_in, x + 8 * n_in, x + 12 * n_in, x + 16 * n_in, x + 20 * n_in
    for part in range(0, PANEL, _SIX):
        s0, s1, s2 = zeros(_SUMS_6), zeros(_SUMS_6), zeros(_SUMS_6)
        s3, s4, s5 = zeros(_SUMS_6), zeros(_SUMS_6), zeros(_SUMS_6)
        for k in range(count):
            prefetch(fetch + step * k, 0, _FLOATS)
            w_k = load(w, PANEL * k + part, weights)
            if block:
                store(block, PANEL * k + part, _SUMS_6, w_k)
            s0 = multiply_add(w_k, number_of(x, k, _SUMS_6), s0)
            s1 = multiply_add(w_k, number_of(x1, k, _SUMS_6), s1)
            s2 = multiply_add(w_k, number_of(x2, k, _SUMS_6), s2)
            s3 = multiply_add(w_k, number_of(x3, k, _SUMS_6), s3)
            s4 = multiply_add(w_k, number_of(x4, k, _SUMS_6), s4)
            s5 = multiply_add(w_k, number_of(x5, k, _SUMS_6), s5)
        add_to(sums, part, s0, _SUMS_6), add_to(sums, part + PANEL, s1, _SUMS_6)
        add_to(sums, part + 2 * PANEL, s2, _SUMS_6), add_to(sums, part + 3 * PANEL, s3, _SUMS_6)
        add_to(sums, part + 4 * PANEL, s4, _SUMS_6), add_to(sums, part + 5 * PANEL, s5, _SUMS_6)


@compile_inline
def four(w, x, n_in, sums, count, fetch, step, weights):  # type: ignore[no-untyped-def]
    """Do the same for 4 vectors, without keeping the weights."""
    x1, x2, x3 = x + 4 * n_in, x + 8 * n_in, x + 12 * n_in
    for part in range(0, PANEL, _SIX):
        s0, s1, s2, s3 = zeros(_SUMS_6), zeros(_SUMS_6), zeros(_SUMS_6), zeros(_SUMS_6)
        for k in range(count):
            prefetch(fetch + step * k, 0, _FLOATS)
            w_k = load(w, PANEL * k + part, weights)
            s0 = multiply_add(w_k, number_of(x, k, _SUMS_6), s0)
            s1 = multiply_add(w_k, number_of(x1, k, _SUMS_6), s1)
            s2 = multiply_add(w_k, number_of(x2, k, _SUMS_6), s2)
            s3 = multiply_add(w_k, number_of(x3, k, _SUMS_6), s3)
        add_to(sums, part, s0, _SUMS_6), add_to(sums, part + PANEL, s1, _SUMS_6)
        add_to(sums, part + 2 * PANEL, s2, _SUMS_6), add_to(sums, part + 3 * PANEL, s3, _SUMS_6)


@compile_inline
def two(w, x, n_in, sums, count, fetch, step, weights):  # type: ignore[no-untyped-def]
    """Do the same for 2 vectors, without keeping the weights."""
    x1 = x + 4 * n_in
    for part in range(0, PANEL, _TWO):
        s0, s1 = zeros(_SUMS_2), zeros(_SUMS_2)
        for k in range(count):
            prefetch(fetch + step * k, 0, _FLOATS)
            w_k = load(w, PANEL * k + part, weights)
            s0 = multiply_add(w_k, number_of(x, k, _SUMS_2), s0)
            s1 = multiply_add(w_k, number_of(x1, k, _SUMS_2), s1)
        add_to(sums, part, s0, _SUMS_2), add_to(sums, part + PANEL, s1, _SUMS_2)


@compile_inline
def one(w, x, sums, count, ahead, weights):  # type: ignore[no-untyped-def]
    """Multiply by one vector; `ahead` is how far ahead of the walk weights are fetched."""
    s = zeros(_FLOATS)
    for k in range(count):
        prefetch(w, PANEL * k + ahead, weights)
        s = multiply_add(load(w, PANEL * k, weights), number_of(x, k, _FLOATS), s)
    add_to(sums, 0, s, _FLOATS)


@compile_inline
def tiles_of(vectors):  # type: ignore[no-untyped-def]
    """How many tiles this many vectors take."""
    return (vectors + 5) // 6 + (1 if vectors % 6 == 3 or vectors % 6 == 5 else 0)


@compile_function
def first_tile(w, x, n_in, sums, vectors, count, fetch, step, block, many, few, single):  # type: ignore[no-untyped-def]
    """Multiply laid-out weights by as many of the vectors as fit into a tile, and give that number.

    `many`, `few` and `single` are the weights' lanes in tiles of 6 or 4, of 2 and of 1. `block` is as for `six`, which
    is the first tile wherever there are more than two.
    """
    if vectors >= 6 and vectors != 8:  # twice 4 rather than 6 and 2
        six(w, x, n_in, sums, count, fetch, step, block, many)
        return 6
    if vectors >= 4:
        four(w, x, n_in, sums, count, fetch, step, many)
        return 4
    if vectors >= 2:
        two(w, x, n_in, sums, count, fetch, step, few)
        return 2
    one(w, x, sums, count, 0, single)
    return 1


@compile_function
def other_tiles(block, x, n_in, sums, done, vectors, count, fetch, step):  # type: ignore[no-untyped-def]
    """Multiply a block of float32 by all vectors from number `done` on."""
    while done < vectors:
        left, x_at, sums_at = vectors - done, x + 4 * done * n_in, sums + 4 * PANEL * done
        if left >= 6 and left != 8:
            six(block, x_at, n_in, sums_at, count, fetch, step, 0, FLOAT32_6)
            done += 6
        elif left >= 4:
            four(block, x_at, n_in, sums_at, count, fetch, step, FLOAT32_6)
            done += 4
        elif left >= 2:
            two(block, x_at, n_in, sums_at, count, fetch, step, FLOAT32_2)
            done += 2
        else:
            one(block, x_at, sums_at, count, 0, FLOAT32_1)
            done += 1
        fetch += step * count
