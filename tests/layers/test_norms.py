"""Norms against torch, and their precision."""

import torch
from torch import nn

from recurra.layers.norms import RMSNorm, unit_length


def test_it_is_torch_s_with_gradients():
    mine, theirs = RMSNorm(6, epsilon=0.1).double(), nn.RMSNorm(6, eps=0.1).double()
    nn.init.normal_(mine.weight)
    theirs.load_state_dict(mine.state_dict())
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.randn_like(x)
    results = [
        (module(x), torch.autograd.grad((weights * module(x)).sum(), [x, module.weight])) for module in (mine, theirs)
    ]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-13)


def test_groups_are_normalised_each_for_itself():
    norm, x = RMSNorm(6, n_groups=3).double(), torch.randn(2, 6, dtype=torch.float64)
    nn.init.normal_(norm.weight)
    pairs = [part / (part.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() for part in x.split(2, -1)]
    torch.testing.assert_close(norm(x), torch.cat(pairs, -1) * norm.weight, rtol=1e-12, atol=1e-13)


def test_a_bfloat16_norm_keeps_float32_inputs_and_makes_float32_of_its_own():
    norm = RMSNorm(6).bfloat16()
    for dtype in (torch.float32, torch.bfloat16):
        assert norm(torch.randn(2, 6, dtype=dtype)).dtype == torch.float32


def test_zeros_stay_zeros_with_finite_gradients():
    x = torch.zeros(1, 4, requires_grad=True)
    y = RMSNorm(4)(x)
    y.sum().backward()
    assert y.eq(0).all()
    assert x.grad.isfinite().all()


def test_lengths_are_one_and_directions_stay():
    x = torch.randn(3, 4, 7, dtype=torch.float64) * 100
    y = unit_length(x)
    torch.testing.assert_close(y, x / torch.linalg.vector_norm(x, dim=-1, keepdim=True), rtol=1e-9, atol=1e-9)


def test_a_vector_of_zeros_stays_and_has_a_finite_gradient():
    x = torch.zeros(2, 3, requires_grad=True)
    y = unit_length(x)
    assert y.eq(0).all()
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()
