"""From magnitude and phase to the planes of a complex transition."""

import math

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


def test_particular_angles():
    phase = torch.tensor([0.0, 1 / 6, 1 / 2, 1.0, -1 / 2], dtype=torch.float64) * math.pi
    re, im = polar_planes(torch.full_like(phase, 2.0), phase)
    torch.testing.assert_close(re, torch.tensor([2.0, 3**0.5, 0, -2, 0]).double(), rtol=0, atol=1e-7)
    torch.testing.assert_close(im, torch.tensor([0.0, 1, 2, 0, -2]).double(), rtol=0, atol=1e-7)


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


def test_third_derivatives():
    def derivatives(planes):
        value = planes[0].pow(2).sum() + planes[1].pow(3).sum()
        for _ in range(3):
            found = torch.autograd.grad(value, (magnitude, phase), create_graph=True)
            value = sum(x.square().sum() for x in found)
        return [x.detach() for x in found]

    magnitude = torch.rand(4, dtype=torch.float64, requires_grad=True)
    phase = torch.randn(4, dtype=torch.float64, requires_grad=True)
    mine = derivatives(polar_planes(magnitude, phase))
    plain = derivatives((magnitude * phase.cos(), magnitude * phase.sin()))
    torch.testing.assert_close(mine, plain, rtol=1e-11, atol=1e-11)


def test_only_what_asks_for_a_gradient_gets_one():
    magnitude, phase = torch.rand(3, requires_grad=True), torch.randn(3)
    re, im = polar_planes(magnitude, phase)
    (re + im).sum().backward()
    torch.testing.assert_close(magnitude.grad, phase.cos() + phase.sin())
    assert polar_planes(magnitude.detach(), phase).re.grad_fn is None


@pytest.mark.compile
def test_compile_equals_eager():
    inputs = (
        torch.rand(5, dtype=torch.float64, requires_grad=True),
        torch.randn(5, dtype=torch.float64, requires_grad=True),
    )
    function = lambda m, p: torch.stack(list(polar_planes(m * 2, p)))  # noqa: E731
    compiled = torch.compile(function, fullgraph=True)
    results = [(f(*inputs), *torch.autograd.grad(f(*inputs).pow(3).sum(), inputs)) for f in (compiled, function)]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
