"""The loop that runs a compiled step: one call from Python, all of a token's instructions (see `instructions`).

Matrices are shared between all threads: each part of one costs the time to read it, so its rows are divided evenly.
Everything else is a few thousand numbers in the cache for each row of the batch, and is shared only in large batches.
"""

from functools import cache

from recurra.decoding._codes import decode, encode
from recurra.decoding._instructions import (
    ATTEND,
    BASES,
    CHOOSE,
    KIND,
    LIGHT,
    LINEAR,
    LOOK_UP,
    MAP,
    OFFSETS,
    OPCODE,
    OUT,
    PAST,
    REPEAT,
    SELECT,
    SIZES,
    STRIDES,
    TURNS,
    UPDATE,
    WORDS,
    A,
    B,
    C,
    D,
    E,
    F,
    G,
)
from recurra.decoding._team import claim, finish, give_up, is_claimed, wait
from recurra.decoding._tiles import apply, fence, gather, number, real, scatter, set_word, stream, word
from recurra.ops._toolkit.launch import Apart, Kernel, call, compile_inline, compile_part
from recurra.ops._toolkit.vector_math import divide, exp, sqrt
from recurra.ops._toolkit.vectors import (
    WIDTH,
    Lanes,
    compiles_for,
    load,
    load_part,
    multiply_add,
    prefetch,
    spread,
    store,
    store_part,
    total,
    width_of,
    zeros,
)

_SPLIT_FROM = 16_384
"""Minimum number of weights of a matrix, or of numbers elsewhere, for which threads share an instruction."""
_FINE_FROM, _FINE = 1_000_000, 4
"""From how many on each thread's share has several parts, so that threads which are ahead help those behind."""

_AHEAD = 8 * WIDTH  # channels: how far ahead the modes of a selective scan are fetched, each row by itself
_FLOATS, _ONE, _FOUR = Lanes("float32", WIDTH), Lanes("float32", 1), Lanes("float32", 4 * WIDTH)
_SHORT = Lanes("float32", 2 * WIDTH)  # three such vectors are in registers at once
_LONG = Lanes("float32", 4 * WIDTH) if compiles_for("avx512f") else _SHORT


@compile_inline
def _place(row, bases, operand):  # type: ignore[no-untyped-def]
    """Address of an operand."""
    return word(bases, word(row, BASES + operand)) + word(row, OFFSETS + operand)


@compile_inline
def _place_in(turn, row, bases, operand):  # type: ignore[no-untyped-def]
    """Address of an operand in a turn of a repetition."""
    return _place(row, bases, operand) + turn * word(row, TURNS + operand)


@compile_inline
def _take(address, stride):  # type: ignore[no-untyped-def]
    if stride == 4:
        return load(address, 0, _FLOATS)
    return gather(address, stride, _FLOATS)


@compile_part
def _light_stretch(function, out, a, b, n):  # type: ignore[no-untyped-def]
    """Fill four registers at a time, as choosing the function takes longer than computing it; return how many."""
    i = 0
    while i + 4 * WIDTH <= n:
        store(out, i, _FOUR, apply(function, load(a, i, _FOUR), load(b, i, _FOUR)))
        i += 4 * WIDTH
    return i


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


@compile_inline
def _share(size, unit, is_split, job, jobs):  # type: ignore[no-untyped-def]
    """Where a job's part of a dimension begins and ends: at multiples of `unit`, or all of it."""
    if not is_split:
        return 0, size
    units = (size + unit - 1) // unit
    return unit * (units * job // jobs), min(size, unit * (units * (job + 1) // jobs))


@compile_part
def _map(row, bases, turn, job, jobs):  # type: ignore[no-untyped-def]
    """The share of one job in a MAP: a part of its outermost dimension in which the output does not stay in place."""
    out, a = _place_in(turn, row, bases, OUT), _place_in(turn, row, bases, A)
    b = _place_in(turn, row, bases, B)
    function, sizes = word(row, KIND), row + 8 * SIZES
    out_by, a_by, b_by = row + 8 * STRIDES, row + 8 * (STRIDES + 4), row + 8 * (STRIDES + 8)
    split = 3
    while split and (word(sizes, split) == 1 or word(out_by, split) == 0):
        split -= 1
    first_0, last_0 = _share(word(sizes, 0), WIDTH, split == 0, job, jobs)
    first_1, last_1 = _share(word(sizes, 1), 1, split == 1, job, jobs)
    first_2, last_2 = _share(word(sizes, 2), 1, split == 2, job, jobs)
    first_3, last_3 = _share(word(sizes, 3), 1, split == 3, job, jobs)
    out, a = out + first_0 * word(out_by, 0), a + first_0 * word(a_by, 0)
    b += first_0 * word(b_by, 0)
    is_light = function < len(LIGHT) and word(out_by, 0) == 4 and word(a_by, 0) == 4 and word(b_by, 0) == 4
    for i in range(first_3, last_3):
        out_1, a_1, b_1 = out + i * word(out_by, 3), a + i * word(a_by, 3), b + i * word(b_by, 3)
        for j in range(first_2, last_2):
            out_2, a_2, b_2 = out_1 + j * word(out_by, 2), a_1 + j * word(a_by, 2), b_1 + j * word(b_by, 2)
            for k in range(first_1, last_1):
                out_3, a_3, b_3 = out_2 + k * word(out_by, 1), a_2 + k * word(a_by, 1), b_2 + k * word(b_by, 1)
                count = last_0 - first_0
                if is_light:
                    done = _light_stretch(function, out_3, a_3, b_3, count)
                    out_3, a_3, b_3, count = out_3 + 4 * done, a_3 + 4 * done, b_3 + 4 * done, count - done
                _stretch(function, out_3, a_3, b_3, count, word(out_by, 0), word(a_by, 0), word(b_by, 0))


@compile_part
def _normalise(row, bases, job, jobs):  # type: ignore[no-untyped-def]
    """The share of one job in the rows of a layer norm."""
    weight, bias, small = _place(row, bases, B), _place(row, bases, C), load(_place(row, bases, D), 0, _ONE)
    rows, n = word(row, SIZES), word(row, SIZES + 1)
    count = number(n, _ONE)
    for r in range(rows * job // jobs, rows * (job + 1) // jobs):
        x, y = _place(row, bases, A) + 4 * r * n, _place(row, bases, OUT) + 4 * r * n
        sums, rest, i = zeros(_FLOATS), zeros(_ONE), 0
        while i + WIDTH <= n:
            sums = sums + load(x, i, _FLOATS)
            i += WIDTH
        while i < n:
            rest = rest + load(x, i, _ONE)
            i += 1
        mean = divide(total(sums) + rest, count)
        means = spread(mean, _FLOATS)
        sums, rest, i = zeros(_FLOATS), zeros(_ONE), 0
        while i + WIDTH <= n:
            sums = sums + (load(x, i, _FLOATS) - means) * (load(x, i, _FLOATS) - means)
            i += WIDTH
        while i < n:
            rest = rest + (load(x, i, _ONE) - mean) * (load(x, i, _ONE) - mean)
            i += 1
        width = sqrt(divide(total(sums) + rest, count) + small)
        widths, i = spread(width, _FLOATS), 0
        while i + WIDTH <= n:
            scaled = divide(load(x, i, _FLOATS) - means, widths)
            store(y, i, _FLOATS, scaled * load(weight, i, _FLOATS) + load(bias, i, _FLOATS))
            i += WIDTH
        while i < n:
            scaled_one = divide(load(x, i, _ONE) - mean, width)
            store(y, i, _ONE, scaled_one * load(weight, i, _ONE) + load(bias, i, _ONE))
            i += 1


@compile_inline
def _advance(x, step, a, b, c, h, after, y, width, n_modes, count):  # type: ignore[no-untyped-def]
    """One step of a selective scan in `count` neighbouring channels; modes lie `width` floats apart."""
    s, out = load_part(step, 0, count, _FLOATS), zeros(_FLOATS)
    drive = s * load_part(x, 0, count, _FLOATS)
    for i in range(n_modes):
        at = i * width
        prefetch(h, at + _AHEAD, _FLOATS)
        prefetch(a, at + _AHEAD, _FLOATS)
        entering = exp(s * load_part(a, at, count, _FLOATS)) * load_part(h, at, count, _FLOATS)
        mode = multiply_add(spread(load(b, i, _ONE), _FLOATS), drive, entering)
        store_part(after, at, count, _FLOATS, mode)
        out = multiply_add(spread(load(c, i, _ONE), _FLOATS), mode, out)
    store_part(y, 0, count, _FLOATS, out)


@compile_part
def _select(row, bases, job, jobs):  # type: ignore[no-untyped-def]
    """The share of one job in the channels of a selective scan."""
    length, width, n_modes = word(row, SIZES + 1), word(row, SIZES + 2), word(row, SIZES + 3)
    first, stop = _share(width, WIDTH, True, job, jobs)
    for r in range(word(row, SIZES)):
        h, last = _place(row, bases, F) + 4 * r * n_modes * width, _place(row, bases, G) + 4 * r * n_modes * width
        for t in range(r * length, (r + 1) * length):
            x, step = _place(row, bases, A) + 4 * t * width, _place(row, bases, B) + 4 * t * width
            b, c = _place(row, bases, D) + 4 * t * n_modes, _place(row, bases, E) + 4 * t * n_modes
            a, y = _place(row, bases, C), _place(row, bases, OUT) + 4 * t * width
            for d in range(first, stop, WIDTH):
                i, count = 4 * d, min(WIDTH, stop - d)
                _advance(x + i, step + i, a + i, b, c, h + i, last + i, y + i, width, n_modes, count)
            h = last


@compile_inline
def _columns(q, k, v, a, f, before, after, y, n, width, a_by, rate, kind, lanes):  # type: ignore[no-untyped-def]
    """One step of a matrix of n rows, as many columns at a time as `lanes` have, all rows of which are in registers."""
    is_past, write = kind & PAST, f + 4 * n
    for j in range(0, width, width_of(lanes)):
        count, here, there = width - j, before + 4 * j, after + 4 * j
        value, seen, out = load_part(v, j, count, lanes), zeros(lanes), zeros(lanes)
        if kind & 1:
            for i in range(n):
                factor = load(k, i, _ONE) * load(a, i * a_by, _ONE)
                seen = multiply_add(spread(factor, lanes), load_part(here, i * width, count, lanes), seen)
            value = spread(load(rate, 0, _ONE), lanes) * (value - seen)
        if kind & 4:
            for i in range(n):
                part = load_part(here, i * width, count, lanes)
                seen = multiply_add(spread(load(f, i, _ONE), lanes), part, seen)
        for i in range(n):
            decay, key = spread(load(a, i * a_by, _ONE), lanes), spread(load(k, i, _ONE), lanes)
            state = multiply_add(key, value, decay * load_part(here, i * width, count, lanes))
            if kind & 4:
                state = multiply_add(spread(load(write, i, _ONE), lanes), seen, state)
            if is_past:
                stream(there + 4 * i * width, state)
            else:
                store_part(there, i * width, count, lanes, state)
            out = multiply_add(spread(load(q, i, _ONE), lanes), state, out)
        store_part(y, j, count, lanes, out)


@compile_part
def _update(row, bases, room, room_size, job, jobs):  # type: ignore[no-untyped-def]
    """The share of one job in the matrices of an UPDATE, each of which is read from memory once."""
    rows, n, width, n_decays = word(row, SIZES), word(row, SIZES + 1), word(row, SIZES + 2), word(row, SIZES + 3)
    a_by, kind, size = 0 if n_decays == 1 else 1, word(row, KIND), word(row, STRIDES)
    wide = (n * width + WIDTH - 1) // WIDTH * WIDTH
    scratch = room + room_size - 4 * wide
    fits_long, fits_short = width % width_of(_LONG) == 0, width % width_of(_SHORT) == 0
    if not fits_short or _place(row, bases, G) % 64:
        kind &= ~PAST
    for r in range(rows * job // jobs, rows * (job + 1) // jobs):
        y, v = _place(row, bases, OUT) + 4 * r * width, _place(row, bases, C) + 4 * r * width
        q, k, a = _place(row, bases, A) + 4 * r * n, _place(row, bases, B) + 4 * r * n, _place(row, bases, D)
        a += 4 * r * n_decays
        h, last, f = _place(row, bases, E) + r * size, _place(row, bases, G) + r * size, _place(row, bases, F)
        if kind & 2:
            decode(scratch, h, wide)
        before, after = (scratch, scratch) if kind & 2 else (h, last)
        rate, f = f + 4 * r, f + 8 * r * n
        if fits_long:
            _columns(q, k, v, a, f, before, after, y, n, width, a_by, rate, kind, _LONG)
        else:
            _columns(q, k, v, a, f, before, after, y, n, width, a_by, rate, kind, _SHORT)
        if kind & 2:
            encode(last, scratch, n * width, wide, False)
    if kind & PAST:
        fence()


@compile_part
def _choose(row, bases, job, jobs):  # type: ignore[no-untyped-def]
    """The share of one job in the rows of a CHOOSE. The first of equal numbers comes first, and NaN anywhere."""
    x, values, numbers = _place(row, bases, A), _place(row, bases, OUT), _place(row, bases, G)
    rows, n, k = word(row, SIZES), word(row, SIZES + 1), word(row, SIZES + 2)
    for r in range(rows * job // jobs, rows * (job + 1) // jobs):
        last = real(x, r * n)
        last_at = -1
        for i in range(k):
            most = last
            best = -1
            for j in range(n):
                value = real(x, r * n + j)
                is_left = last_at < 0 or value < last or (value == last and j > last_at)
                if is_left and (best < 0 or value > most):
                    best = j
                    most = value
            last_at = best if best >= 0 else i
            last = real(x, r * n + last_at)
            store(values, r * k + i, _ONE, load(x, r * n + last_at, _ONE))
            set_word(numbers + 8 * (r * k + i), last_at)


@compile_part
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


@compile_part
def _work_of(row, bases):  # type: ignore[no-untyped-def]
    """How many numbers an instruction computes with, or how many weights a matrix has."""
    if word(row, OPCODE) == LINEAR:
        return word(row, SIZES + 1) * word(row, SIZES + 2)
    if word(row, OPCODE) == ATTEND:  # the steps of all rows
        steps = 0
        for r in range(word(row, SIZES)):
            steps += word(_place(row, bases, D), 3 * r + 2)
        return steps * word(row, SIZES + 1) * word(row, SIZES + 3)
    numbers = word(row, SIZES) * word(row, SIZES + 1) * word(row, SIZES + 2) * word(row, SIZES + 3)
    is_light = word(row, OPCODE) != SELECT and (word(row, OPCODE) != MAP or word(row, KIND) < len(LIGHT))
    return numbers if is_light else 5 * numbers


def _run_share(row, bases, turn, room, room_size, job, jobs):  # type: ignore[no-untyped-def]
    """The share of one job in an instruction, if not in a LOOK_UP."""
    opcode = word(row, OPCODE)
    if opcode == LINEAR:
        weight, scale, bias = _place(row, bases, B), _place(row, bases, C), _place(row, bases, D)
        x, y = _place(row, bases, A), _place(row, bases, OUT)
        vectors, n_in, n_out = word(row, SIZES), word(row, SIZES + 1), word(row, SIZES + 2)
        if word(row, SIZES + 3) > 1:
            chosen = word(_place(row, bases, E), 0)
            weight, scale = weight + chosen * word(row, SIZES + 3), scale + 4 * chosen * n_out
        call(word(row, KIND), (weight, scale, bias, x, y, vectors, n_in, n_out, room, room_size, job, jobs))
    elif opcode == MAP:
        _map(row, bases, turn, job, jobs)
    elif opcode == SELECT:
        _select(row, bases, job, jobs)
    elif opcode == UPDATE:
        _update(row, bases, room, room_size, job, jobs)
    elif opcode == ATTEND:
        y, q, k, v = _place(row, bases, OUT), _place(row, bases, A), _place(row, bases, B), _place(row, bases, C)
        rows, turns, scratch = _place(row, bases, D), _place(row, bases, E), _place(row, bases, F)
        rest = word(row, SIZES), word(row, SIZES + 1), word(row, SIZES + 2), word(row, SIZES + 3), word(row, STRIDES)
        call(word(row, KIND), (y, q, k, v, rows, turns, scratch, *rest, job, jobs))
    elif opcode == CHOOSE:
        _choose(row, bases, job, jobs)
    else:
        _normalise(row, bases, job, jobs)
    return 0


run_share = Apart(_run_share)


@compile_inline
def _is_split(row, bases, threads):  # type: ignore[no-untyped-def]
    return threads > 1 and word(row, OPCODE) != LOOK_UP and _work_of(row, bases) >= _SPLIT_FROM


@compile_part
def _walk(run, table, instructions, bases, missing, room, room_size, sync, give_way, thread, threads):  # type: ignore[no-untyped-def]
    """Run what this thread claims: parts of an instruction that is split, or all of those between two such."""
    at, first, end, turn, turns = 0, 0, 0, 0, 1
    stage, parts, is_between, is_mine = 1, 0, False, False
    while at < instructions:
        row = table + 8 * WORDS * at
        at += 1
        if word(row, OPCODE) == REPEAT:
            first, end, turn, turns = at, at + word(row, SIZES), 0, word(row, SIZES + 1)
        elif _is_split(row, bases, threads):
            if is_mine:
                finish(sync)
            is_between, is_mine = False, False
            if not wait(sync, parts, give_way):
                return
            each = _FINE if _work_of(row, bases) >= _FINE_FROM else 1
            job = claim(sync, thread, threads, stage, each)
            while job >= 0:
                call(run, (row, bases, turn, room, room_size, job, each * threads))
                finish(sync)
                job = claim(sync, thread, threads, stage, each)
            stage, parts = stage + 1, parts + each * threads
        else:
            if not is_between:
                if not wait(sync, parts, give_way):
                    return
                is_between, is_mine = True, is_claimed(sync, thread, stage)
                stage, parts = stage + 1, parts + 1
            if is_mine:
                if word(row, OPCODE) != LOOK_UP:
                    call(run, (row, bases, turn, room, room_size, 0, 1))
                elif not _look_up(row, bases):
                    set_word(missing, 1)
                    give_up(sync)
                    return
        if at == end:
            turn += 1
            if turn < turns:
                at = first
            else:
                turn, end = 0, 0
    if is_mine:
        finish(sync)


@cache
def step_kernel() -> Kernel:
    """Give the kernel of (run, table, instructions, bases, missing, room, room_size, sync, give_way, threads).

    All are addresses and counts; `run` is that of `run_share`. Each thread has `room_size` bytes in `room`, and they
    meet in `sync` (see `_team`). `missing` becomes 1 if a run ends at a row that does not exist.
    """

    def run_step(run, table, instructions, bases, missing, room, room_size, sync, give_way, threads, share):  # type: ignore[no-untyped-def]
        alone = share[1] - share[0] == threads
        for thread in range(share[0], share[0] + 1 if alone else share[1]):
            own, team = room + room_size * thread, 1 if alone else threads
            _walk(run, table, instructions, bases, missing, own, room_size, sync, give_way, thread, team)

    return Kernel(run_step)
