"""How tensors are described to a kernel, and how rows are split between jobs."""

import torch

from recurra.ops import _operator as tensors


def test_helpers_describe_memory():
    x = torch.zeros(2, 3, 8)[:, :, ::2]
    assert tensors.last_dim_contiguous(x).stride(-1) == 1
    expanded = torch.zeros(1, 1, 4).expand(2, 3, 4)
    assert tensors.last_dim_contiguous(expanded) is expanded, "rows shared by all need no copy"
    assert tensors.describe(expanded) == (expanded.data_ptr(), 0, 0)
    c = torch.zeros(2, 3, 4, dtype=torch.complex64)
    assert tensors.describe(c) == (c.data_ptr(), 24, 8), "strides count floats"


def test_spans_cover_the_row_on_the_borders_of_cache_lines(set_threads):
    for threads in (1, 2, 3, 7):
        set_threads(threads)
        for batch in (1, 2, 3, 8):
            for row in (1, 17, 64, 65, 200, 1000, 5000):
                span = tensors.span_of_job(row, batch)
                assert 0 < span <= row
                assert span == row or span % 64 == 0
                assert batch >= threads or span == row or batch * -(-row // span) <= threads + batch
                assert batch < threads or span == row
