"""positive_features has the reference's features, peaks, gradients and second derivatives."""

import pytest
import torch

from recurra.layers.features import LOWEST, _positive_features_reference, positive_features

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6}
SHAPES = [(1, 1, 1, 1), (1, 9, 2, 5), (3, 2, 3, 16), (2, 13, 1, 17), (2, 7, 2, 38), (0, 4, 1, 3)]


def draw(batch, length, heads, size, dtype=torch.float64, starts=False):
    """Exponents that rise and fall by whole powers, and maxima before them."""
    q, k = (3 * torch.randn(2, batch, length, heads, size, dtype=dtype)).unbind()
    start = torch.full((batch, heads, size), LOWEST) if starts else torch.randn(batch, heads, size)
    less = torch.rand(batch, length, heads, dtype=dtype)
    return [x.clone().requires_grad_() for x in (q, k, less)] + [start.to(dtype)]


def loss_of(found, uses=("queries", "keys")):
    return sum(
        (torch.sin(torch.arange(x.numel())).view_as(x) * x).sum() for x in (getattr(found, name) for name in uses)
    )


@pytest.mark.parametrize("uses", [("queries", "keys"), ("queries",), ("keys",)], ids="-".join)
@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_it_is_the_reference(dtype, shape, starts, uses):
    inputs = draw(*shape, dtype, starts)
    results = [function(*inputs) for function in (positive_features, _positive_features_reference)]
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCES[dtype] * 4)
    assert not any(x.requires_grad for x in (results[0].decay, results[0].peak))
    leaves = inputs[:3]
    found, expected = (torch.autograd.grad(loss_of(x, uses), leaves, materialize_grads=True) for x in results)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=0, atol=20 * TOLERANCES[dtype])


def test_large_exponents_stay_finite():
    q, k, less, start = draw(2, 9, 2, 21, torch.float32)
    results = [f(200 * q, 200 * k, less, start) for f in (positive_features, _positive_features_reference)]
    for one, other in zip(*results):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert max(x.max() for x in results[0][:3]) <= 1


@pytest.mark.parametrize("size", [5, 21])
def test_a_number_that_is_not_one_stays_in_its_feature(size):
    q, k, less, start = draw(1, 6, 1, size, torch.float32)
    with torch.no_grad():
        k[0, 2, 0, size - 1] = torch.nan
    for one, other in zip(positive_features(q, k, less, start), _positive_features_reference(q, k, less, start)):
        assert torch.equal(one.isnan(), other.isnan())
        assert one.isnan().any()
