"""RNN is its cell, step by step, with the products with x and the shared matrices made once."""

import copy

import pytest
import torch

from recurra.mixers.rnn import RNN, RNNState
from recurra.ops.cells.gru import GRUCell
from recurra.ops.cells.ncgru import NCGRUCell
from recurra.ops.cells.orthogonal import Cayley, Neumann

CELLS = {
    "gru": lambda: GRUCell(3, 5),
    "ncgru": lambda: NCGRUCell(3, 5, rho=2),
    "neumann": lambda: NCGRUCell(3, 5, rho=2, neumann=Neumann()),
}
CLOSE = {"rtol": 1e-10, "atol": 1e-11}


@pytest.fixture(params=CELLS)
def rnn(request):
    return RNN(CELLS[request.param]()).double()


def draw(batch, length):
    return torch.randn(batch, length, 3, dtype=torch.float64)


@pytest.mark.parametrize("start", [False, True])
def test_the_layer_is_its_cell_step_by_step(rnn, start):
    x = draw(2, 7)
    h = torch.randn(2, 5, dtype=torch.float64) if start else torch.zeros(2, 5, dtype=torch.float64)
    y, state = rnn(x, RNNState(h) if start else None)
    for t in range(7):
        h = rnn.cell(x[:, t], h)
        torch.testing.assert_close(y[:, t], h, **CLOSE)
    torch.testing.assert_close(state.h, h, **CLOSE)


@pytest.mark.parametrize(
    "cell",
    [GRUCell(2, 3), NCGRUCell(2, 3, rho=1), NCGRUCell(2, 3, rho=1, neumann=Neumann(tolerance=1e-14))],
    ids=list(CELLS),
)
def test_gradients(cell):
    rnn = RNN(cell).double()
    parameters = dict(rnn.named_parameters())

    def run(x, h, *values):
        y, state = torch.func.functional_call(rnn, dict(zip(parameters, values)), (x, RNNState(h)))
        return y, state.h

    h = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    three, two = (torch.randn(2, n, 2, dtype=torch.float64, requires_grad=True) for n in (3, 2))
    assert torch.autograd.gradcheck(run, (three, h, *parameters.values()))
    assert torch.autograd.gradgradcheck(run, (two, h, *parameters.values()))


def test_shared_work_is_done_once_a_call(monkeypatch):
    rnn, calls = RNN(NCGRUCell(3, 5)), []
    transform, project = Cayley.forward, GRUCell.project
    monkeypatch.setattr(Cayley, "forward", lambda self, entries: calls.append("cayley") or transform(self, entries))
    monkeypatch.setattr(GRUCell, "project", lambda self, x: calls.append("project") or project(self, x))
    rnn(torch.randn(2, 9, 3))
    assert sorted(calls) == ["cayley", "project"]


def test_other_cells_are_refused():
    with pytest.raises(TypeError, match="cell is a GRUCell of torch"):
        RNN(torch.nn.GRUCell(3, 5))
    with pytest.raises(TypeError, match="cell is a Linear of torch"):
        RNN(torch.nn.Linear(3, 5))


@pytest.mark.compile
def test_compiled_training_equals_eager():
    """Over some updates, so that what the Neumann series keeps is also kept in the compiled module."""
    eager = RNN(CELLS["neumann"]()).double()
    rnn = copy.deepcopy(eager)
    compiled = torch.compile(rnn, fullgraph=True, backend="aot_eager")  # traces both ways, needs no compiler
    x, start, histories = draw(2, 3), RNNState(torch.randn(2, 5, dtype=torch.float64)), []
    for module, function in ((eager, eager), (rnn, compiled)):
        optimizer, history = torch.optim.SGD(module.parameters(), lr=1e-3), []
        for _ in range(3):
            y, state = function(x, start)
            optimizer.zero_grad()
            (y.square().sum() + state.h.sum()).backward()
            optimizer.step()
            history += [y, state.h, *(parameter.grad for parameter in module.parameters())]
        histories.append([tensor.detach().clone() for tensor in [*history, *module.state_dict().values()]])
    for actual, expected in zip(*histories):
        torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-9)
