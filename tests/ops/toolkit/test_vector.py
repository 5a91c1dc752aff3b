"""The short vectors of the kernels: each operation in its own kernel, against torch and against integers."""

from functools import cache

import numba
import pytest
import torch

from recurra.ops._toolkit.vectors import (
    WIDTH,
    Lanes,
    conjugate,
    converts_float16,
    folded,
    load,
    load_part,
    multiply_add,
    prefetch,
    spread,
    store,
    store_part,
    totals,
    turn,
    width_of,
)

FULL_TYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def lanes_of(dtype, width=WIDTH):
    return Lanes(str(dtype.to_real()).removeprefix("torch."), width, dtype.is_complex)


@cache
def compiled(operation, lanes, lanes_out):
    """Apply `operation` to three arrays of floats, one vector after the other."""
    operation = numba.njit(operation, forceinline=True)

    def kernel(a, b, c, out, n):
        for i in range(0, n, width_of(lanes)):
            prefetch(a, i + 4096, lanes)
            store(out, i, lanes_out, operation(load(a, i, lanes), load(b, i, lanes), load(c, i, lanes)))

    return numba.njit(kernel)


def apply(operation, a, b, c, dtype_out=None, width=WIDTH):
    out = torch.full(a.shape, float("nan")).to(dtype_out or a.dtype)
    floats = a.numel() * (2 if a.is_complex() else 1)
    kernel = compiled(operation, lanes_of(a.dtype, width), lanes_of(out.dtype, width))
    kernel(a.data_ptr(), b.data_ptr(), c.data_ptr(), out.data_ptr(), floats)
    return out


def recurrence(a, b, c):
    return a * b + c


def mixture(a, b, c):
    return (a - b) * conjugate(c)


def copy(a, b, c):
    return a


@pytest.mark.parametrize("dtype", FULL_TYPES, ids=str)
def test_arithmetic(dtype):
    a, b, c = torch.randn(3, 8 * WIDTH, dtype=dtype)
    width = 2 if dtype.is_complex else 1
    for operation, expected in ((recurrence, a * b + c), (mixture, (a - b) * c.conj())):
        wide, narrow = (apply(operation, a, b, c, width=w) for w in (WIDTH, width))
        assert torch.equal(wide, narrow)
        if dtype.is_complex:
            torch.testing.assert_close(wide, expected, rtol=4 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
        else:
            assert torch.equal(wide, expected)


@pytest.mark.parametrize("dtype", FULL_TYPES, ids=str)
def test_products_are_rounded_before_they_are_added(dtype):
    """A fused multiply-add would keep the last bits of the product, and differ from the reference."""
    eps = torch.finfo(dtype).eps
    x = torch.full((2 * WIDTH,), 1 + eps, dtype=dtype)
    assert apply(recurrence, x, x, -(1 + 2 * eps) * torch.ones_like(x)).count_nonzero() == 0


def test_every_bfloat16_is_widened_as_it_is():
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    wide = apply(copy, every, every, every, torch.float32)
    assert torch.equal(wide.view(torch.int32), every.view(torch.int16).to(torch.int32) << 16)


needs_float16 = pytest.mark.skipif(not converts_float16(), reason="no instructions for float16")


@needs_float16
def test_every_float16_is_widened_as_it_is():
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    wide, expected = apply(copy, every, every, every, torch.float32), every.float()
    assert torch.equal(wide.isnan(), every.isnan())
    assert torch.equal(wide[~every.isnan()].view(torch.int32), expected[~every.isnan()].view(torch.int32))


@needs_float16
@pytest.mark.parametrize("width", [1, WIDTH])
def test_rounding_to_float16(width):
    """To nearest, ties to even, as torch does it: around every float16 and between them, and at random."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    between = every.float() + torch.cat([every[1:], every[:1]]).float()
    exact = torch.cat([every.float(), between / 2, torch.randint(-(2**31), 2**31, (2**16,)).int().view(torch.float32)])
    x = torch.cat([exact, *(exact.nextafter(torch.tensor(end)) for end in (-torch.inf, torch.inf))])
    rounded, expected = apply(copy, x, x, x, torch.float16, width), x.to(torch.float16)
    assert torch.equal(rounded.isnan(), x.isnan())
    known = ~x.isnan()
    assert torch.equal(rounded[known].view(torch.int16), expected[known].view(torch.int16))


@pytest.mark.parametrize("width", [1, WIDTH])
def test_rounding_to_bfloat16(width):
    """To nearest, ties to even, as torch does it: around every bfloat16, and at random."""
    high = torch.arange(65536, dtype=torch.int64) << 16
    around = torch.cat([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    bits = torch.cat([around, torch.randint(2**32, (2**16,))])
    x = torch.where(bits < 2**31, bits, bits - 2**32).to(torch.int32).view(torch.float32)
    rounded, expected = apply(copy, x, x, x, torch.bfloat16, width), x.to(torch.bfloat16)
    assert torch.equal(rounded.isnan(), x.isnan())
    known = ~x.isnan()
    assert torch.equal(rounded[known].view(torch.int16), expected[known].view(torch.int16))


def test_loads_and_stores_need_no_alignment():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x, y = torch.randn(WIDTH + 1).to(dtype), torch.zeros(WIDTH + 2, dtype=dtype)
        kernel = compiled(copy, lanes_of(dtype), lanes_of(dtype))
        kernel(x[1:].data_ptr(), x.data_ptr(), x.data_ptr(), y[1:].data_ptr(), WIDTH)
        assert torch.equal(y[1:-1], x[1:])
        assert y[[0, -1]].tolist() == [0, 0], "a vector is as wide as it says"


lanes_f32, lanes_f64 = Lanes("float32", WIDTH), Lanes("float64", WIDTH)


def parts(count, lanes):
    """Copy `count` floats of what starts one float into a."""
    return numba.njit(lambda a, out: store_part(out, 1, count, lanes, load_part(a, 1, count, lanes)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [WIDTH, 4 * WIDTH])
def test_parts_of_vectors(dtype, width):
    lanes, a = lanes_of(dtype, width), torch.randn(width + 2, dtype=dtype)
    for count in (0, 1, width - 1, width, width + 5):
        out = torch.full_like(a, float("nan"))
        parts(count, lanes)(a.data_ptr(), out.data_ptr())
        n = min(count, width)
        assert torch.equal(out[1 : 1 + n], a[1 : 1 + n])
        assert out[:1].isnan().all()
        assert out[1 + n :].isnan().all()


def test_lanes_beyond_a_part_are_zero():
    lanes, a, out = lanes_of(torch.float32), torch.ones(3), torch.full((WIDTH,), float("nan"))
    numba.njit(lambda a, out: store(out, 0, lanes, load_part(a, 0, 3, lanes)))(a.data_ptr(), out.data_ptr())
    assert torch.equal(out, torch.cat([torch.ones(3), torch.zeros(WIDTH - 3)]))


@pytest.mark.parametrize("dtype", FULL_TYPES, ids=str)
def test_products_added_and_numbers_spread(dtype):
    a, b, c = torch.randn(3, 4 * WIDTH, dtype=dtype)
    one = lanes_of(dtype, 2 if dtype.is_complex else 1)
    found = apply(lambda a, b, c: multiply_add(a, b, c), a, b, c)
    torch.testing.assert_close(found, a * b + c, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    lanes, out = lanes_of(dtype), torch.empty_like(a)
    numba.njit(lambda a, out: store(out, 0, lanes, spread(load(a, 0, one), lanes)))(a[1:].data_ptr(), out.data_ptr())
    n = WIDTH // (2 if dtype.is_complex else 1)
    assert torch.equal(out[:n], a[1].expand(n))


@pytest.mark.parametrize("dtype", FULL_TYPES, ids=str)
def test_sums_within_vectors(dtype):
    """`totals` of whole numbers, which no order of sums rounds; `folded` keeps the place within a register."""
    per_vector = WIDTH // (2 if dtype.is_complex else 1)
    a = torch.randint(-99, 99, (per_vector, per_vector)).to(dtype)
    a = a + 1j * a.T if dtype.is_complex else a
    lanes, long, out = lanes_of(dtype), lanes_of(dtype, 4 * WIDTH), torch.empty(per_vector, dtype=dtype)
    numba.njit(lambda a, out: store(out, 0, lanes, totals(a, lanes)))(a.data_ptr(), out.data_ptr())
    assert torch.equal(out, a.sum(1))
    numba.njit(lambda a, out: store(out, 0, lanes, folded(load(a, 0, long))))(a.data_ptr(), out.data_ptr())
    assert torch.equal(out, a[:4].sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_become_columns_and_nothing_beyond_them_is_written(dtype):
    lanes, source = lanes_of(dtype), torch.randn(WIDTH, 20, dtype=dtype)
    kernel = numba.njit(lambda a, out, n, m: turn(a, 20, out, 30, n, m, lanes))
    for n_rows, n_columns in ((WIDTH, WIDTH), (WIDTH + 1, 7), (3, WIDTH + 9), (1, 1), (5, 0)):
        out, (n, m) = torch.full((20, 30), 9.0, dtype=dtype), (min(n_rows, WIDTH), min(n_columns, WIDTH))
        kernel(source.data_ptr(), out.data_ptr(), n_rows, n_columns)
        assert torch.equal(out[:m, :n], source[:n, :m].T)
        assert (out == 9).sum() == out.numel() - n * m
