"""The kernels of the cross-entropy have the reference's losses, gradients and second derivatives."""

import pytest
import torch

from recurra.layers import cross_entropy as module
from recurra.layers.cross_entropy import _cross_entropy_reference, cross_entropy
from recurra.layers.embeddings import IGNORED_TARGET

EPSILONS = {torch.float32: 2e-6, torch.bfloat16: 5e-3}


def draw(rows, columns, dtype=torch.float32, scale=3.0):
    """Logits, and targets of which every third is ignored."""
    targets = torch.randint(columns, (rows,))
    targets[::3] = IGNORED_TARGET
    return (scale * torch.randn(rows, columns)).to(dtype).requires_grad_(), targets


@pytest.fixture
def by_kernels(monkeypatch):
    """Refuse the reference."""
    monkeypatch.setattr(module, "_cross_entropy_reference", None)


@pytest.mark.parametrize("dtype", EPSILONS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (4, 3), (5, 64), (7, 131), (40, 1000)])  # vectors have 64 numbers, and 1
def test_it_is_the_reference(shape, dtype, by_kernels):
    logits, targets = draw(*shape, dtype)
    wide = logits.detach().double().requires_grad_()
    losses, expected = cross_entropy(logits, targets), _cross_entropy_reference(wide, targets)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, rtol=2e-6, atol=2e-6)
    assert losses[::3].abs().max() == 0
    weights = torch.linspace(-1, 2, shape[0])
    (found,), (right,) = (
        torch.autograd.grad(losses, logits, weights),
        torch.autograd.grad(expected, wide, weights.double()),
    )
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), right, rtol=EPSILONS[dtype], atol=1e-7)


@pytest.mark.parametrize("value", [1e4, -1e4, 1e6, 88.0])
def test_logits_far_from_zero(value, by_kernels):
    logits = (torch.randn(3, 70) + value).requires_grad_()
    targets = torch.tensor([0, 69, 33])
    losses = cross_entropy(logits, targets)
    wide = logits.detach().double()
    expected = _cross_entropy_reference(wide.requires_grad_(), targets)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-6)
    (found,), (right,) = torch.autograd.grad(losses.sum(), logits), torch.autograd.grad(expected.sum(), wide)
    torch.testing.assert_close(found.double(), right, rtol=0, atol=1e-6)


def test_a_probable_target_keeps_the_digits_of_its_gradient(by_kernels):
    """softmax - 1 is -1e-4 here, where bfloat16 has no number between 0.996 and 1."""
    logits = torch.zeros(1, 3, dtype=torch.bfloat16)
    logits[0, 1] = 10
    (found,) = torch.autograd.grad(cross_entropy(logits.requires_grad_(), torch.tensor([1])).sum(), logits)
    expected = -2 / (torch.tensor(10.0).exp() + 2)
    torch.testing.assert_close(found[0, 1].float(), expected, rtol=5e-3, atol=0)


def test_nan_stays_in_its_row(by_kernels):
    logits, targets = draw(4, 20)
    with torch.no_grad():
        logits[1, 7] = torch.nan
    losses = cross_entropy(logits, targets)
    assert losses.isnan().tolist() == [False, True, False, False]
    found = torch.autograd.grad(losses[[0, 2, 3]].sum(), logits)[0]
    assert found[[0, 2, 3]].isfinite().all()


def test_rows_that_are_not_dense(by_kernels):
    logits, targets = torch.randn(30, 5).t().requires_grad_(), torch.randint(30, (5,))
    (found,) = torch.autograd.grad(cross_entropy(logits, targets).sum(), logits)
    wide = logits.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(_cross_entropy_reference(wide, targets).sum(), wide)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)


def test_transforms():
    logits, targets = draw(4, 9)
    loss = lambda logits: cross_entropy(logits, targets).sum()  # noqa: E731
    (expected,) = torch.autograd.grad(loss(logits), logits)
    torch.testing.assert_close(torch.func.grad(loss)(logits.detach()), expected)
    _, tangent = torch.func.jvp(loss, (logits.detach(),), (torch.ones_like(logits),))
    torch.testing.assert_close(tangent, expected.sum(), rtol=0, atol=1e-5)
