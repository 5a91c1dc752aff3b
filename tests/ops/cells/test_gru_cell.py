"""GRUCell is eq. (4), written out by hand, and is not torch.nn.GRU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recurra.ops.cells.gru import GRUCell

CLOSE = {"rtol": 1e-12, "atol": 1e-13}


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def by_hand(cell, x, h):
    """Eq. (4) for one stream, from the cell's named weights."""
    r = sigmoid(cell.reset.input @ x + cell.reset.recurrent @ h + cell.reset.bias)
    u = sigmoid(cell.update.input @ x + cell.update.recurrent @ h + cell.update.bias)
    c = torch.tanh(cell.candidate.input @ x + cell.candidate.recurrent @ (r * h) + cell.candidate.bias)
    return (1 - u) * h + u * c


def torch_gru(cell):
    """torch.nn.GRU with the cell's weights: its update gate keeps h where ours replaces it: signs turn."""
    gru = torch.nn.GRU(cell.input_size, cell.hidden_size, batch_first=True).double()
    reset, update, candidate = cell.reset, cell.update, cell.candidate
    with torch.no_grad():
        gru.weight_ih_l0.copy_(torch.cat([reset.input, -update.input, candidate.input]))
        gru.weight_hh_l0.copy_(torch.cat([reset.recurrent, -update.recurrent, candidate.recurrent]))
        gru.bias_ih_l0.copy_(torch.cat([reset.bias, -update.bias, candidate.bias]))
        gru.bias_hh_l0.zero_()
    return gru


def torch_step(cell, x, h):
    return torch_gru(cell)(x.unsqueeze(1), h.unsqueeze(0))[1].squeeze(0)


@pytest.fixture
def cell():
    return GRUCell(3, 5).double()


@pytest.fixture
def x():
    return torch.randn(4, 3, dtype=torch.float64)


@pytest.fixture
def h():
    return torch.randn(4, 5, dtype=torch.float64).tanh()


def test_one_step_is_equation_4(cell, x, h):
    expected = torch.stack([by_hand(cell, x[row], h[row]) for row in range(4)])
    torch.testing.assert_close(cell(x, h), expected, **CLOSE)


def test_torch_gru_is_another_cell(cell, x, h):
    assert (torch_step(cell, x, h) - cell(x, h)).abs().max() > 1e-2


def test_torch_gru_is_the_cell_with_an_open_reset_gate(cell, x, h):
    """r = 1 hides the difference, so the weights are the right ones."""
    with torch.no_grad():
        cell.reset.bias.fill_(1e3)
    torch.testing.assert_close(torch_step(cell, x, h), cell(x, h), **CLOSE)


def test_torch_gru_is_the_formula_with_the_reset_after_the_product(cell, x, h):
    weights = cell.recurrent_weights()
    r, u, _ = cell.gates(cell.project(x), h, weights)
    after = torch.tanh(x @ cell.candidate.input.T + r * (h @ cell.candidate.recurrent.T) + cell.candidate.bias)
    torch.testing.assert_close(torch_step(cell, x, h), (1 - u) * h + u * after, **CLOSE)


def test_a_diagonal_candidate_matrix_does_not_care_where_the_reset_is(cell, x, h):
    with torch.no_grad():
        cell.candidate_weight.copy_(torch.diag(torch.randn(5, dtype=torch.float64)))
    torch.testing.assert_close(torch_step(cell, x, h), cell(x, h), **CLOSE)


def test_named_weights_share_memory_with_the_parameters(cell):
    for row in (cell.reset, cell.update, cell.candidate):
        assert [tuple(w.shape) for w in row] == [(5, 3), (5, 5), (5,)]
        with torch.no_grad():
            for weight in row:
                weight.zero_()
    assert all(not parameter.any() for parameter in cell.parameters())


def test_projecting_many_steps_is_projecting_each(cell):
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    torch.testing.assert_close(cell.project(x)[:, 4], cell.project(x[:, 4]), **CLOSE)


@given(seed=st.integers(0, 1000), scale=st.sampled_from([0.1, 1.0, 5.0, 30.0]))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_the_gradient_stays_below_its_bound(seed, scale):
    """||dh_t / dh_{t-1}|| <= alpha + beta ||U_c||, eq. (5)-(9), from the named weights and gates."""
    torch.manual_seed(seed)
    cell = GRUCell(3, 5).double()
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.mul_(scale)
    x, h = torch.randn(1, 3, dtype=torch.float64), torch.randn(1, 5, dtype=torch.float64).tanh()
    jacobian = torch.autograd.functional.jacobian(lambda h: cell(x, h), h)[0, :, 0]
    r, u, c = (gate.detach() for gate in cell.gates(cell.project(x), h, cell.recurrent_weights()))

    def norm(matrix):
        return torch.linalg.matrix_norm(matrix.detach(), 2)

    delta_r, delta_u = (r * (1 - r)).max(), (u * (1 - u)).max()
    alpha = delta_u * (h.abs().max() + c.abs().max()) * norm(cell.update.recurrent) + (1 - u).max()
    beta = u.max() * (delta_r * norm(cell.reset.recurrent) * h.abs().max() + r.max())
    assert norm(jacobian) <= alpha + beta * norm(cell.candidate.recurrent) + 1e-12
    assert max(delta_r, delta_u) <= 0.25


def test_gradients(cell, x, h):
    parameters = dict(cell.named_parameters())

    def run(x, h, *values):
        return torch.func.functional_call(cell, dict(zip(parameters, values)), (x, h))

    inputs = (x.requires_grad_(), h.requires_grad_(), *parameters.values())
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_initial_weights_fill_their_interval():
    cell = GRUCell(30, 100)
    for parameter in cell.parameters():
        assert parameter.abs().max() <= 0.1
        assert parameter.min() < -0.09
        assert parameter.max() > 0.09


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_state_keeps_its_precision_in_a_short_module(dtype):
    cell = GRUCell(3, 5)
    x, h = torch.randn(4, 3), torch.randn(4, 5).tanh()
    exact = cell(x, h)
    short = cell.to(dtype)(x.to(dtype), h)
    assert short.dtype == torch.float32
    torch.testing.assert_close(short, exact, rtol=0.02, atol=0.02)


def test_the_state_stays_float32_under_autocast():
    cell = GRUCell(3, 5)
    x, h = torch.randn(4, 3), torch.randn(4, 5).tanh()
    with torch.autocast("cpu", torch.bfloat16):
        assert cell.project(x).dtype == torch.bfloat16
        h_next = cell(x, h)
    assert h_next.dtype == torch.float32
    torch.testing.assert_close(h_next, cell(x, h), rtol=0.02, atol=0.02)
    # the part that the update gate keeps is not rounded to bfloat16
    with torch.no_grad():
        cell.update.bias.fill_(-1e3)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cell(x, h), h)


@pytest.mark.parametrize(("sizes", "name"), [((0, 4), "input_size is 0"), ((4, -1), "hidden_size is -1")])
def test_sizes_are_positive(sizes, name):
    with pytest.raises(ValueError, match=name):
        GRUCell(*sizes)


def test_wrong_channels_are_named(cell, x, h):
    with pytest.raises(ValueError, match=r"x is float64 \(4, 2\) on cpu; expected 3 channels, the cell's input_size"):
        cell(x[:, :2], h)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_state_of_another_batch_is_refused(cell, h, rows):
    with pytest.raises(ValueError, match=rf"h is float64 \({rows}, 5\) on cpu; expected .*\(4, 5\)"):
        cell.entering(h[:rows], 4)


def test_a_state_of_another_size_is_refused(cell, x, h):
    with pytest.raises(ValueError, match=r"h is float64 \(4, 4\)"):
        cell(x, h[:, :4])
