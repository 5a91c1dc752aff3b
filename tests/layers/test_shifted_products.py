"""shifted_products has the reference's outputs, its gradients and its second derivatives."""

import pytest
import torch

from recurra.layers.convolution import _shifted_products_reference, shifted_products

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6}
SHAPES = [(1, 1, 1, 1), (1, 2, 5, 4), (3, 9, 16, 2), (2, 13, 70, 4), (2, 5, 129, 3), (0, 4, 3, 2)]  # B, L, D and K


def draw(batch, length, channels, kernel_size, dtype=torch.float64, bias=True):
    shapes = [(batch, length, channels), (batch, kernel_size - 1, channels), (kernel_size, channels), (channels,)]
    drawn = [torch.randn(s, dtype=dtype).requires_grad_() for s in shapes]
    return drawn if bias else [*drawn[:3], None]


def results(function, inputs):
    y = function(*inputs)
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    loss = (torch.sin(torch.arange(y.numel())).view_as(y) * y).sum()
    return (y, *torch.autograd.grad(loss, leaves))


def require_near(found, expected, tolerance):
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        scale = other.detach().abs().max().item() if other.numel() else 1.0
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * max(scale, 1.0))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_it_is_the_reference(dtype, shape, bias):
    inputs = draw(*shape, dtype, bias)
    found, expected = (results(function, inputs) for function in (shifted_products, _shifted_products_reference))
    require_near(found, expected, TOLERANCES[dtype])


def test_inputs_may_be_a_part_of_wider_rows():
    _, state, weight, bias = draw(3, 7, 10, 4, torch.float32)
    wide = torch.randn(3, 7, 31)[..., 11:21].requires_grad_()
    require_near(
        *(
            results(f, [wide, state, weight.t().contiguous().t(), bias])
            for f in (shifted_products, _shifted_products_reference)
        ),
        2e-6,
    )
