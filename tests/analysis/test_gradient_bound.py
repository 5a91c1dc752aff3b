"""The bound of CRT appendix B: against a computation by hand, against exact Jacobians, and where it is tight."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recurra.analysis.gradient_flow import a_priori_step_bound, step_bound
from recurra.ops.cells.gru import GRUCell
from recurra.ops.cells.orthogonal import NCGRUCell


def step_norms(cell: GRUCell, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """||dh_t/dh_{t-1}|| of each step, from torch.autograd.functional."""
    jacobians = [
        torch.autograd.functional.jacobian(lambda before, x=x_t: cell(x[None], before[None])[0], h_t)
        for x_t, h_t in zip(x, h)
    ]
    return torch.linalg.svdvals(torch.stack(jacobians))[:, 0]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_alpha_and_beta_by_hand():
    """Two channels and diagonal matrices: each norm is the larger entry, each gate a sigmoid in closed form."""
    cell = GRUCell(1, 2).double()
    with torch.no_grad():
        cell.input_weight.zero_()
        cell.bias.copy_(torch.tensor([0.3, -0.2, 1.5, -0.4, 0.1, 0.2], dtype=torch.float64))
        cell.gate_weight.copy_(torch.tensor([[0.5, 0], [0, -2.0], [0.7, 0], [0, 1.1]], dtype=torch.float64))
        cell.candidate_weight.copy_(torch.tensor([[-3.0, 0], [0, 1.0]]))
    h = (-0.9, 0.25)
    r = (sigmoid(0.3 + 0.5 * h[0]), sigmoid(-0.2 - 2 * h[1]))
    u = (sigmoid(1.5 + 0.7 * h[0]), sigmoid(-0.4 + 1.1 * h[1]))
    c = (math.tanh(0.1 - 3 * r[0] * h[0]), math.tanh(0.2 + r[1] * h[1]))
    delta_u, delta_r = (max(gate * (1 - gate) for gate in gates) for gates in (u, r))
    bound = step_bound(cell, torch.zeros(1, 1).double(), torch.tensor([h], dtype=torch.float64))
    alpha = delta_u * (0.9 + max(c)) * 1.1 + 1 - u[1]
    beta = u[0] * (delta_r * 2 * 0.9 + r[0])
    assert (max(u), max(r), max(map(abs, c))) == (u[0], r[0], max(c))
    torch.testing.assert_close(bound.alpha, torch.tensor([alpha], dtype=torch.float64), rtol=1e-12, atol=0)
    torch.testing.assert_close(bound.beta, torch.tensor([beta], dtype=torch.float64), rtol=1e-12, atol=0)
    assert float(bound.candidate_norm) == 3
    torch.testing.assert_close(bound.norm, torch.tensor([alpha + 3 * beta], dtype=torch.float64), rtol=1e-12, atol=0)
    assert float(a_priori_step_bound(cell)) == pytest.approx(1.1 / 2 + 1 + (2 / 4 + 1) * 3)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([GRUCell, NCGRUCell]),
    st.integers(1, 7),
    st.floats(0.0, 30.0),
    st.floats(0.0, 30.0),
    st.integers(0, 2**31),
)
def test_no_step_exceeds_its_bound(kind, size, gate_scale, input_scale, seed):
    """For all gates: open, half open, saturated. States are in [-1, 1], as eq. (10) requires."""
    torch.manual_seed(seed)
    cell = kind(3, size).double().requires_grad_(False)
    cell.gate_weight *= gate_scale
    if kind is GRUCell:
        cell.candidate_weight *= gate_scale
    x, h = input_scale * torch.randn(4, 3).double(), 2 * torch.rand(4, size).double() - 1
    bound = step_bound(cell, x, h).norm
    assert (step_norms(cell, x, h) <= bound * (1 + 1e-12)).all()
    assert (bound <= a_priori_step_bound(cell) * (1 + 1e-12)).all()


def test_one_channel_meets_the_bound():
    """c = 1, h = -1, u = 1/2, r = 0: the derivative is (1 - u) + (c - h) u (1 - u) U_u, and so is alpha."""
    cell = GRUCell(1, 1).double().requires_grad_(False)
    cell.input_weight.zero_()
    cell.gate_weight.copy_(torch.tensor([[0.0], [3.0]]))
    cell.bias.copy_(torch.tensor([-800.0, 3.0, 40.0]))
    x, h = torch.zeros(1, 1).double(), -torch.ones(1, 1).double()
    bound = step_bound(cell, x, h)
    torch.testing.assert_close(bound.alpha, torch.tensor([0.5 + 2 * 0.25 * 3], dtype=torch.float64), rtol=1e-12, atol=0)
    torch.testing.assert_close(step_norms(cell, x, h), bound.alpha, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("update", "expected"), [((40, 40), 1.0), ((-40, -40), 1.0), ((40, -40), 2.0)])
def test_gates_near_0_and_1_with_an_orthogonal_matrix(update, expected):
    """CRT eq. (11): about 1 if all gates are 0 or all are 1. If some are 0 and others 1, the bound is 2."""
    cell = NCGRUCell(3, 4).double().requires_grad_(False)
    cell.input_weight.zero_()
    cell.bias[:4] = 40
    cell.bias[4:6], cell.bias[6:8] = update
    x, h = torch.zeros(5, 3).double(), 2 * torch.rand(5, 4).double() - 1
    bound = step_bound(cell, x, h)
    assert float(bound.candidate_norm) == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(bound.norm, torch.full((5,), expected).double(), rtol=1e-10, atol=0)
