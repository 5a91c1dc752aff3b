"""The scaled Cayley transform gives orthogonal matrices, and the right ones."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recurra.ops.cells.orthogonal import Cayley, _skew_symmetric, draw_skew_symmetric, lower_entries


def distance(u):
    u = u.detach().double()
    return float(torch.linalg.matrix_norm(u.T @ u - torch.eye(len(u), dtype=torch.float64)))


def random_entries(size, scale=1.0, dtype=torch.float64):
    return scale * torch.randn(size * (size - 1) // 2, dtype=dtype)


def test_the_entries_are_the_strict_lower_triangle():
    a = _skew_symmetric(torch.tensor([1.0, 2.0, 3.0]), 3)
    assert a.tolist() == [[0, -1, -2], [1, 0, -3], [2, 3, 0]]
    assert lower_entries(a).tolist() == [1, 2, 3]


@pytest.mark.parametrize("rho", [0, 1, 4, 6])
def test_the_formula(rho):
    entries = random_entries(6)
    a, identity = _skew_symmetric(entries, 6), torch.eye(6, dtype=torch.float64)
    d = torch.diag(torch.tensor([1.0] * (6 - rho) + [-1.0] * rho, dtype=torch.float64))
    u = Cayley(6, rho)(entries)
    torch.testing.assert_close(u, torch.linalg.inv(identity + a) @ (identity - a) @ d, rtol=1e-12, atol=1e-13)
    assert float(torch.linalg.det(u)) == pytest.approx((-1) ** rho)


@given(
    size=st.integers(1, 40),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4]),
    seed=st.integers(0, 100),
    data=st.data(),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_orthogonal_whatever_a_is(size, scale, seed, data):
    torch.manual_seed(seed)
    rho = data.draw(st.integers(0, size))
    assert distance(Cayley(size, rho)(random_entries(size, scale, torch.float32))) < 3e-6


def test_orthogonal_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        u = Cayley(20, 3)(random_entries(20, dtype=torch.float32))
    assert u.dtype == torch.float32
    assert distance(u) < 3e-6


def test_gradients():
    cayley = Cayley(4, 1)
    entries = random_entries(4).requires_grad_()
    assert torch.autograd.gradcheck(cayley, entries)
    assert torch.autograd.gradgradcheck(cayley, entries)


def test_the_start_turns_by_at_most_a_quarter():
    u = Cayley(40, 0)(lower_entries(draw_skew_symmetric(40).double()))
    angles = torch.linalg.eigvals(u).angle().abs()
    assert angles.max() <= math.pi / 2 + 1e-6
    assert angles.max() > 1.3
    assert angles.min() < 0.3
    # 2x2 blocks and nothing else
    blocks = torch.block_diag(*[torch.ones(2, 2)] * 20)
    assert not u[blocks == 0].any()


@pytest.mark.parametrize("rho", [0, 2, 5])
def test_right_inverse_finds_the_entries(rho):
    entries, cayley = random_entries(5), Cayley(5, rho)
    torch.testing.assert_close(cayley.right_inverse(cayley(entries)), entries, rtol=1e-9, atol=1e-10)


def test_a_reflection_has_a_transform_only_with_the_right_signs():
    reflection = torch.diag(torch.tensor([1.0, 1.0, 1.0, -1.0]))
    with pytest.raises(ValueError, match="choose another rho"):
        Cayley(4, 0).right_inverse(reflection)
    cayley = Cayley(4, 1)
    assert torch.equal(cayley(cayley.right_inverse(reflection)), reflection)


def test_only_orthogonal_matrices_have_a_right_inverse():
    with pytest.raises(ValueError, match=r"expected below 0\.001, for an orthogonal matrix"):
        Cayley(4, 0).right_inverse(torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"expected below 0\.001, for an orthogonal matrix"):
        Cayley(4, 0).right_inverse(torch.full((4, 4), math.nan))


@pytest.mark.parametrize("rho", [-1, 5])
def test_rho_is_a_number_of_signs(rho):
    with pytest.raises(ValueError, match=f"rho is {rho}; expected 0 to 4"):
        Cayley(4, rho)
