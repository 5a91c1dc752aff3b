"""RNN is its cell, step by step, with the products with x and the shared matrices made once."""

import copy

import pytest
import torch

from recurra.mixers.rnn import RNN, RNNState
from recurra.ops.cells.gru import GRUCell
from recurra.ops.cells.orthogonal import NCGRUCell, Neumann

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
