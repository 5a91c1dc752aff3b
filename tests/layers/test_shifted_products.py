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


@pytest.mark.parametrize("frozen", range(4))
def test_what_needs_no_gradient_gets_none(frozen):
    inputs = draw(2, 5, 6, 3, torch.float32)
    inputs[frozen].requires_grad_(False)
    require_near(*(results(function, inputs) for function in (shifted_products, _shifted_products_reference)), 2e-6)


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


def test_second_derivatives():
    inputs, found = draw(2, 4, 5, 3, torch.float32), []
    for function in (shifted_products, _shifted_products_reference):
        first = torch.autograd.grad(function(*inputs).sin().sum(), inputs, create_graph=True)
        found.append((*first, *torch.autograd.grad(sum(x.sin().sum() for x in first), inputs)))
    require_near(*found, 2e-5)


def test_a_batch_of_gradients():
    inputs = draw(2, 3, 5, 3, torch.float32)
    y = shifted_products(*inputs)
    several = torch.randn(3, *y.shape)
    backward = lambda gradient: torch.autograd.grad(y, inputs, gradient, retain_graph=True)  # noqa: E731
    found = torch.func.vmap(backward)(several)
    for i, gradient in enumerate(several):
        require_near([one[i] for one in found], backward(gradient), 1e-5)
