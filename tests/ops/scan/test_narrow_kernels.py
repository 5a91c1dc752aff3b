"""Narrow rows in registers: the two vectors cover the row, and the results are those of the kernels for wide rows."""

import pytest
import torch

from recurra import linear_scan
from recurra.ops.scan import _cpu as narrow_kernels
from recurra.ops.scan import operator
from recurra.ops.scan._cpu import WIDEST_ROW, vector_width


@pytest.mark.parametrize("is_complex", [False, True])
def test_two_vectors_cover_the_row_and_nothing_beside_it(is_complex):
    for row in range(2 if is_complex else 1, WIDEST_ROW + 1, 2 if is_complex else 1):
        width = vector_width(row, is_complex)
        assert width & (width - 1) == 0
        assert width <= row <= 2 * width
        assert width % 2 == 0 or not is_complex


ONE_OF_EACH_WIDTH = (1, 3, 5, 13, 31, 63)
DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


@pytest.mark.parametrize(
    ("dtype", "reverse", "sizes"),
    [
        *zip(DTYPES, (True, False, False, True), [ONE_OF_EACH_WIDTH] * 4),
        *(
            pytest.param(dtype, reverse, (1, 2, 3, 5, 7, 8, 13, 16, 21, 31, 32, 63), marks=pytest.mark.slow)
            for dtype in DTYPES
            for reverse in (False, True)
        ),
    ],
    ids=str,
)
def test_the_kernels_for_wide_rows_give_the_same_bits(dtype, reverse, sizes, monkeypatch):
    for channels in sizes:
        inputs = [
            torch.randn(shape, dtype=dtype, requires_grad=True)
            for shape in ((3, 9, channels), (3, 9, channels), (3, channels))
        ]
        dh = torch.randn(3, 9, channels, dtype=dtype)

        def run(inputs=inputs, dh=dh):
            h = linear_scan(*inputs, reverse=reverse, backend="numba")
            return [h, *torch.autograd.grad(h, inputs, dh)]

        narrow = run()
        with monkeypatch.context() as patch:
            patch.setattr(narrow_kernels, "WIDEST_ROW", 0)
            patch.setattr(operator, "_kernels_for_rows", operator._kernels_for_rows.__wrapped__)  # without its cache
            wide = run()
        for name, mine, other in zip(("h", "da", "db", "dh0"), narrow, wide):
            assert torch.equal(mine, other), f"{name} at {channels} channels"
