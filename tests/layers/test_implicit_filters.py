"""Implicit filters against their formula, number by number, and the convolution with a window in all its ways."""

import math

import pytest
import torch

from recurra.layers.convolution import _DIRECT, _LONG, ImplicitFilters, convolve_window


@torch.no_grad()
def by_the_formula(layer: ImplicitFilters, step: int, channel: int) -> float:
    """One number of a filter, in plain Python but for the matrix products."""
    share = step / max(layer.length - 1, 1)
    bands = [1e-4 + (15 - 1e-4) * band / 15 for band in range(16)]
    angles = [2 * math.pi * band * step / layer.length for band in bands]
    z = torch.tensor([share, *map(math.cos, angles), *(-math.sin(angle) for angle in angles)], dtype=torch.float64)
    for hidden in layer.hidden:
        z = torch.sin(layer.frequency * (hidden.weight @ z + hidden.bias))
    slow, fast = math.log(100) / 1.5, math.log(100) / 0.3
    rate = slow + (fast - slow) * channel / max(layer.n_filters - 1, 1)
    return float(layer.output.weight[channel].detach() @ z) * (math.exp(-rate * share) + 0.05)


@pytest.mark.parametrize(("n_filters", "length"), [(3, 7), (1, 1), (5, 40)])
def test_filters_are_the_formula(n_filters, length):
    layer = ImplicitFilters(n_filters, length).double()
    with torch.no_grad():
        layer.frequency.add_(torch.randn_like(layer.frequency))
        filters = layer()
    assert filters.shape == (length, n_filters)
    for step in {0, length // 2, length - 1}:
        for channel in range(n_filters):
            expected = by_the_formula(layer, step, channel)
            assert float(filters[step, channel]) == pytest.approx(expected, rel=1e-10, abs=1e-13)


def test_filters_are_float32_in_bfloat16_and_under_autocast():
    layer = ImplicitFilters(3, 20)
    expected = layer()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(), expected)
    rounded = layer.bfloat16()()
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded, layer.float()())


@pytest.mark.parametrize("length", [1, 2, _LONG - 1, _LONG, _LONG + 11, 2 * _DIRECT + 44])
@pytest.mark.parametrize("window", [1, 2, 9, 50, _LONG + 1, _DIRECT + 72])
def test_a_window_is_convolved_as_written(length, window):
    x, past = torch.randn(2, length, 3).double(), torch.randn(2, window - 1, 3).double()
    filters = torch.randn(window, 3).double()
    leaves = [t.requires_grad_() for t in (x, past, filters)]
    y, following = convolve_window(x, filters, past)
    seen = torch.cat([past, x], 1)
    expected = (seen.unfold(1, window, 1) * filters.flip(0).t()).sum(-1)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)
    assert torch.equal(following, seen[:, length:])
    weights, limits = torch.randn_like(y), {"rtol": 1e-10, "atol": 1e-11}
    known = {"allow_unused": True, "materialize_grads": True}
    first = [torch.autograd.grad(out, leaves, weights, retain_graph=True, **known) for out in (y, expected)]
    torch.testing.assert_close(*first, **limits)
    again = [torch.autograd.grad(out, leaves, weights, create_graph=True, **known) for out in (y, expected)]
    second = [torch.autograd.grad(sum(x.square().sum() for x in one), leaves, **known) for one in again]
    torch.testing.assert_close(*second, rtol=1e-9, atol=1e-8)
