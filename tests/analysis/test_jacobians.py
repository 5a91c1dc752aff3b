import pytest
import torch

from recurra.analysis import gradient_flow as module
from recurra.analysis.gradient_flow import _jacobians, _spectral_norms, _step_jacobians


@pytest.fixture(params=[3, 64])
def rows(request, monkeypatch) -> int:
    """The number of rows that are differentiated together."""
    monkeypatch.setattr(module, "_ROWS", request.param)
    return request.param


def test_jacobians_are_torch_s(rows):
    a, b = torch.randn(2, 3).double(), torch.randn(5).double()

    def function(a, b):
        return torch.cat([(a.sin() @ torch.ones(3).double()), b * b.sum() + a[0, 0], b[:1].exp()])

    expected = torch.autograd.functional.jacobian(function, (a, b))
    a.requires_grad_()
    b.requires_grad_()
    measured = _jacobians(function(a, b), [a, b], "rows")
    assert [tuple(jacobian.shape) for jacobian in measured] == [(8, 2, 3), (8, 5)]
    for one, other in zip(measured, expected):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_step_jacobians_are_each_step_s_own(rows):
    x, h = torch.randn(4, 2).double(), torch.randn(4, 5).double()
    weight = torch.randn(5, 2).double()

    def function(h, x):
        return (h.cumsum(-1) * (x @ weight.t())).tanh()

    pairs = [torch.autograd.functional.jacobian(function, (h_t, x_t)) for h_t, x_t in zip(h, x)]
    h.requires_grad_()
    x.requires_grad_()
    for one, others in zip(_step_jacobians(function(h, x), [h, x], "steps"), zip(*pairs)):
        torch.testing.assert_close(one, torch.stack(others), rtol=1e-12, atol=1e-14)


def test_spectral_norms():
    matrices = torch.randn(3, 4, 5).double()
    expected = torch.linalg.svdvals(matrices)[:, 0]
    torch.testing.assert_close(_spectral_norms(matrices, "norms"), expected, rtol=1e-12, atol=0)
