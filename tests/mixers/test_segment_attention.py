"""SegmentAttention in bfloat16: short segments that train go through plain products, and stay near float64."""

import copy

import pytest
import torch
from torch.nn import functional

from recurra.mixers.segment_attention import SegmentAttention


def differentiate(layer, x):
    x = x.detach().requires_grad_()
    y, _ = layer(x)
    inputs = [x, *layer.parameters()]
    return [y, *torch.autograd.grad((y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum(), inputs)]


@pytest.fixture
def layer():
    return SegmentAttention(12, n_heads=2, segment_length=5).bfloat16()


def test_training_in_bfloat16_avoids_the_slow_fast_kernel(layer, monkeypatch):
    x = torch.randn(2, 8, 12).bfloat16()
    expected = differentiate(copy.deepcopy(layer).double(), x.double())
    monkeypatch.delattr(functional, "scaled_dot_product_attention")
    for found, exact in zip(differentiate(layer, x), expected):
        assert found.dtype == torch.bfloat16
        assert (found - exact).norm() < 0.03 * exact.norm()


def test_a_call_without_a_gradient_takes_the_fast_kernel(layer, monkeypatch):
    monkeypatch.delattr(functional, "scaled_dot_product_attention")
    with torch.no_grad(), pytest.raises(AttributeError, match="scaled_dot_product_attention"):
        layer(torch.randn(2, 8, 12).bfloat16())
