"""Vectors of length 1."""

import torch

from recurra.layers.norms import unit_length


def test_lengths_are_one_and_directions_stay():
    x = torch.randn(3, 4, 7, dtype=torch.float64) * 100
    y = unit_length(x)
    torch.testing.assert_close(y, x / torch.linalg.vector_norm(x, dim=-1, keepdim=True), rtol=1e-9, atol=1e-9)


def test_a_vector_of_zeros_stays_and_has_a_finite_gradient():
    x = torch.zeros(2, 3, requires_grad=True)
    y = unit_length(x)
    assert y.eq(0).all()
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


def test_half_types_become_float32():
    x = torch.randn(5, 8).bfloat16()
    y = unit_length(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(torch.linalg.vector_norm(y, dim=-1), torch.ones(5))
