"""From magnitude and phase to the planes of a complex transition."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from recurra.ops.gate_loop.fused import polar_planes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_planes(dtype):
    magnitude, phase = torch.rand(2, 5, 7, dtype=dtype), 10 * torch.randn(2, 5, 7, dtype=dtype)
    planes = polar_planes(magnitude, phase)
    assert planes.re.dtype == dtype
    expected = torch.polar(magnitude, phase)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(torch.complex(*planes), expected, rtol=0, atol=tolerance)


def test_derivatives_by_differences():
    """First and second derivatives of both planes, and of each alone."""
    magnitude = torch.rand(3, dtype=torch.float64, requires_grad=True)
    phase = torch.randn(3, dtype=torch.float64, requires_grad=True)
    for function in (
        lambda m, p: tuple(polar_planes(m, p)),
        lambda m, p: polar_planes(m, p).re,
        lambda m, p: polar_planes(m, p).im,
    ):
        assert gradcheck(function, (magnitude, phase))
        assert gradgradcheck(function, (magnitude, phase))


def test_gradients_where_the_magnitude_is_zero():
    """There the phase has no gradient and the magnitude has: no plane is divided by sine or cosine."""
    magnitude = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    phase = torch.randn(4, dtype=torch.float64, requires_grad=True)
    re, im = polar_planes(magnitude, phase)
    d_magnitude, d_phase = torch.autograd.grad(re.sum() + 2 * im.sum(), (magnitude, phase))
    torch.testing.assert_close(d_magnitude, (phase.cos() + 2 * phase.sin()).detach())
    assert d_phase.count_nonzero() == 0
