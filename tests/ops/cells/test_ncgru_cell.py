"""NCGRUCell is the GRU with an orthogonal candidate matrix, which stays orthogonal."""

import copy

import pytest
import torch

from recurra.mixers.rnn import RNN
from recurra.ops.cells.gru import GRUCell
from recurra.ops.cells.orthogonal import NCGRUCell, Neumann

BOTH = pytest.mark.parametrize("neumann", [None, Neumann()], ids=["exact", "neumann"])


def train(cell, steps, rate=1e-2, check=lambda step: None):
    """A few channels, a task that moves every weight: repeat the input of two steps ago."""
    rnn, readout = RNN(cell), torch.nn.Linear(cell.hidden_size, cell.input_size, dtype=cell.bias.dtype)
    optimizer = torch.optim.Adam([*rnn.parameters(), *readout.parameters()], lr=rate)
    for step in range(steps):
        x = torch.randn(8, 4, cell.input_size, dtype=cell.bias.dtype)
        y, _ = rnn(x)
        optimizer.zero_grad()
        (readout(y) - x.roll(2, 1)).square().mean().backward()
        optimizer.step()
        check(step)


@BOTH
def test_it_is_the_gru_with_its_matrix(neumann):
    nc, gru = NCGRUCell(3, 6, rho=2, neumann=neumann).double(), GRUCell(3, 6).double()
    with torch.no_grad():
        for name, parameter in gru.named_parameters():
            parameter.copy_(getattr(nc, name))
    x, h = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(nc(x, h), gru(x, h), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(nc.candidate.recurrent, gru.candidate_weight, rtol=1e-12, atol=1e-13)
    assert float(torch.linalg.matrix_norm(nc.candidate.recurrent.detach(), 2)) == pytest.approx(1.0)


@BOTH
def test_orthogonal_through_hundreds_of_steps(neumann):
    cell = NCGRUCell(4, 16, rho=3, neumann=neumann)
    start = cell.candidate_weight.detach().clone()
    worst, exact = 0.0, 0

    def check(step):
        nonlocal worst, exact
        worst = max(worst, float(cell.orthogonality_error()))
        exact += neumann is not None and int(cell.parametrizations.candidate_weight[0].age) == 0

    train(cell, 200, 5e-3, check)
    assert worst < 1e-5
    assert (cell.candidate_weight - start).norm() > 1.0
    assert exact < 100  # the series was used, not only exact inverses


def test_both_ways_learn_the_same():
    results = []
    for neumann in (None, Neumann()):
        torch.manual_seed(5)
        cell = NCGRUCell(4, 16, rho=3, neumann=neumann).double()
        train(cell, 30)
        results.append(cell.candidate_weight.detach())
        assert float(cell.cayley_error()) < 1e-5
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_errors_are_reported():
    cell = NCGRUCell(4, 16, neumann=Neumann(order=1, tolerance=1e-2))
    train(cell, 10, 1e-3)
    assert 1e-6 < float(cell.cayley_error()) <= 2e-2
    assert 1e-7 < float(cell.orthogonality_error()) <= 4e-2
    assert NCGRUCell(4, 16).double().cayley_error() == 0


def test_the_parameters_are_the_triangle_of_a():
    cell = NCGRUCell(3, 6)
    shapes = {name: tuple(parameter.shape) for name, parameter in cell.named_parameters()}
    assert shapes == {
        "input_weight": (18, 3),
        "bias": (18,),
        "gate_weight": (12, 6),
        "parametrizations.candidate_weight.original": (15,),
    }


@pytest.mark.parametrize(("rho", "negative"), [(None, 2), (0, 0), (17, 17), (40, 40)])
def test_rho_counts_the_negative_signs(rho, negative):
    cell = NCGRUCell(2, 40, rho=rho)
    signs = cell.parametrizations.candidate_weight[0].signs
    assert signs.tolist() == [1.0] * (40 - negative) + [-1.0] * negative
    assert "parametrizations.candidate_weight.0.signs" in cell.state_dict()


@BOTH
def test_an_orthogonal_matrix_can_be_assigned(neumann):
    cell = NCGRUCell(3, 6, rho=2, neumann=neumann).double()
    wanted = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0]
    wanted[0] *= torch.linalg.det(wanted)  # rho is even: the determinant is 1
    cell.candidate_weight = wanted
    torch.testing.assert_close(cell.candidate_weight, wanted, rtol=1e-9, atol=1e-10)
    with pytest.raises(ValueError, match=r"expected below 0\.001, for an orthogonal matrix"):
        cell.candidate_weight = 2 * wanted
    wanted[0] *= -1
    with pytest.raises(ValueError, match="choose another rho"):
        cell.candidate_weight = wanted


@BOTH
def test_saved_loaded_and_copied_in_the_middle_of_training(neumann, tmp_path):
    cell = NCGRUCell(4, 12, neumann=neumann)
    train(cell, 5, 1e-4)
    torch.save(cell.state_dict(), tmp_path / "cell.pt")
    twin, loaded = copy.deepcopy(cell), NCGRUCell(4, 12, rho=7, neumann=neumann)
    loaded.load_state_dict(torch.load(tmp_path / "cell.pt", weights_only=True))
    weights = []
    for other in (cell, twin, loaded):
        torch.manual_seed(9)
        train(other, 5, 1e-4)
        weights.append(list(other.state_dict().values()))
    for other in weights[1:]:
        assert all(torch.equal(one, two) for one, two in zip(other, weights[0]))
    with torch.no_grad():
        twin.parametrizations.candidate_weight.original.add_(1.0)
    assert not torch.allclose(twin.candidate_weight, cell.candidate_weight)


@BOTH
def test_built_without_memory_and_loaded(neumann):
    cell = NCGRUCell(4, 12, neumann=neumann)
    with torch.device("meta"):
        other = NCGRUCell(4, 12, neumann=neumann)
    assert other.candidate_weight.is_meta
    other.to_empty(device="cpu").load_state_dict(cell.state_dict())
    assert torch.equal(other.candidate_weight, cell.candidate_weight)


@BOTH
def test_orthogonal_under_autocast(neumann):
    cell = NCGRUCell(4, 16, neumann=neumann)
    with torch.autocast("cpu", torch.bfloat16):
        train(cell, 20)
        assert float(cell.orthogonality_error()) < 1e-5
    assert cell.candidate_weight.dtype == torch.float32


@BOTH
def test_gradients(neumann):
    neumann = neumann and Neumann(tolerance=1e-14)
    cell = NCGRUCell(2, 4, rho=1, neumann=neumann).double()
    parameters = dict(cell.named_parameters())

    def run(x, h, *values):
        return torch.func.functional_call(cell, dict(zip(parameters, values)), (x, h))

    x, h = torch.randn(2, 2, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    inputs = (x.requires_grad_(), h.requires_grad_(), *parameters.values())
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("rho", [-1, 7])
def test_rho_out_of_range(rho):
    with pytest.raises(ValueError, match=f"rho is {rho}"):
        NCGRUCell(3, 6, rho=rho)


def test_sizes_are_positive():
    with pytest.raises(ValueError, match="hidden_size is 0"):
        NCGRUCell(3, 0)
