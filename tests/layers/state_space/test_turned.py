"""turned has the reference's B, C and products, its gradients and its second derivatives."""

import pytest
import torch

from recurra.layers.positions import rotate
from recurra.layers.turned import _turned_reference, turned

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6}
SHAPES = [  # B, L, H, n and pairs
    (1, 1, 1, 2, 1), (1, 9, 2, 5, 1), (3, 2, 3, 16, 8), (2, 13, 1, 40, 17), (2, 3, 2, 38, 9), (2, 3, 1, 48, 16),
    (0, 4, 1, 4, 1),
]  # fmt: skip


def draw(batch, length, heads, size, pairs, dtype=torch.float64):
    shapes = [(size,), (size,), (pairs,), (1,)]
    return [torch.randn(batch, length, heads, *s, dtype=dtype).requires_grad_() for s in shapes]


def loss_of(found, uses=("b", "c", "dots")):
    return sum(
        (torch.sin(torch.arange(x.numel())).view_as(x) * x).sum() for x in (getattr(found, name) for name in uses)
    )


def require_near(found, expected, tolerance):
    scale = expected.detach().abs().max().item() if expected.numel() else 1.0
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * max(scale, 1.0))


@pytest.mark.parametrize("uses", [("b", "c", "dots"), ("b",), ("c", "dots")], ids="-".join)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_it_is_the_reference(dtype, shape, uses):
    inputs = draw(*shape, dtype)
    results = [function(*inputs) for function in (turned, _turned_reference)]
    for one, other in zip(*results):
        require_near(one, other, TOLERANCES[dtype])
    gradients = [torch.autograd.grad(loss_of(x, uses), inputs, materialize_grads=True) for x in results]
    for one, other in zip(*gradients):
        require_near(one, other, 2 * TOLERANCES[dtype])


def test_the_first_pairs_turn_and_the_others_stay():
    b, c, angles, scale = draw(2, 3, 2, 22, 9, torch.float32)
    found = turned(b, c, angles, scale)
    torch.testing.assert_close(found.c[..., :18], rotate(c[..., :18], angles))
    assert torch.equal(found.c[..., 18:], c[..., 18:])
    torch.testing.assert_close((found.b * found.c).sum(-1, keepdim=True), scale * found.dots, rtol=1e-5, atol=1e-5)


def test_layouts_other_than_dense():
    b, c, angles, scale = draw(2, 3, 2, 22, 9, torch.float32)
    results = []
    for function in (turned, _turned_reference):
        found = function(b.transpose(0, 2), c.transpose(0, 2), angles.transpose(0, 2), scale.transpose(0, 2))
        results.append((*found, *torch.autograd.grad(found.b.sum() + found.c.sum(), (b, c, angles, scale))))
    for one, other in zip(*results):
        require_near(one, other, 2e-5)


def test_views_that_are_negated_later():
    """As the imaginary part of a conjugate is: what lies at their address has the other sign."""
    sizes = [(1, 2, 1, 4), (1, 2, 1, 4), (1, 2, 1, 2), (1, 2, 1, 1)]
    b, c, angles, scale = (torch.randn(size) for size in sizes)
    inputs = [torch._neg_view(b).requires_grad_(), torch._neg_view(c), angles, scale]
    gradient = torch._neg_view(torch.randn(sizes[0]))
    results = []
    for function in (turned, _turned_reference):
        found = function(*inputs)
        results.append([*found, *torch.autograd.grad(found.b, inputs[:1], gradient)])
    for one, other in zip(*results):
        require_near(one, other, 1e-6)
