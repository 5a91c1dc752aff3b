"""RNN is its cell, step by step, with the products with x and the shared matrices made once."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


def in_pieces(rnn, x, pieces, state=None):
    outputs = []
    for piece in x.split(pieces, 1):
        y, state = rnn(piece, state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def results(rnn, x, pieces, h):
    """Outputs, last state and all gradients of a loss over both."""
    x = x.clone().requires_grad_()
    h = None if h is None else h.clone().requires_grad_()
    y, state = in_pieces(rnn, x, pieces, h if h is None else RNNState(h))
    loss = (torch.sin(torch.arange(y.numel())).view_as(y) * y).sum() + state.h.square().sum()
    leaves = [x, *rnn.parameters()] + ([] if h is None else [h])
    return [y, state.h, *torch.autograd.grad(loss, leaves, materialize_grads=True)]


@pytest.mark.parametrize("start", [False, True])
def test_the_layer_is_its_cell_step_by_step(rnn, start):
    x = draw(2, 7)
    h = torch.randn(2, 5, dtype=torch.float64) if start else torch.zeros(2, 5, dtype=torch.float64)
    y, state = rnn(x, RNNState(h) if start else None)
    for t in range(7):
        h = rnn.cell(x[:, t], h)
        torch.testing.assert_close(y[:, t], h, **CLOSE)
    torch.testing.assert_close(state.h, h, **CLOSE)


@given(
    pieces=st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 7]), min_size=1, max_size=6),
    cell=st.sampled_from(sorted(CELLS)),
    resumed=st.booleans(),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_cut_gives_the_whole(pieces, cell, resumed):
    rnn = RNN(CELLS[cell]()).double()
    x = draw(2, sum(pieces))
    h = torch.randn(2, 5, dtype=torch.float64) if resumed else None
    for cut, whole in zip(results(rnn, x, pieces, h), results(rnn, x, [sum(pieces)], h)):
        torch.testing.assert_close(cut, whole, **CLOSE)


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


def test_no_steps_change_nothing(rnn):
    h = torch.randn(2, 5, dtype=torch.float64)
    y, state = rnn(draw(2, 0), RNNState(h))
    assert y.shape == (2, 0, 5)
    assert torch.equal(state.h, h)
    assert torch.equal(rnn(draw(2, 0))[1].h, torch.zeros(2, 5, dtype=torch.float64))


def test_an_empty_batch_runs(rnn):
    y, state = rnn(draw(0, 4))
    assert y.shape == (0, 4, 5)
    assert state.h.shape == (0, 5)


def test_a_given_state_is_not_changed(rnn):
    h = torch.randn(2, 5, dtype=torch.float64)
    before = h.clone()
    y, _ = rnn(draw(2, 4), RNNState(h))
    y.sum().backward()
    assert torch.equal(h, before)


def test_the_last_output_is_the_state(rnn):
    y, state = rnn(draw(2, 4))
    assert torch.equal(y[:, -1], state.h)


@pytest.mark.parametrize("name", CELLS)
def test_the_state_is_float32_under_autocast(name):
    rnn, x = RNN(CELLS[name]()), torch.randn(2, 30, 3)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = rnn(x)
        y, state = rnn(x, state)
        y.float().sum().backward()
    assert (y.dtype, state.h.dtype) == (torch.bfloat16, torch.float32)
    assert {parameter.grad.dtype for parameter in rnn.parameters()} == {torch.float32}
    exact, last = rnn(x, rnn(x)[1])
    torch.testing.assert_close(y.float(), exact, rtol=0.05, atol=0.05)
    torch.testing.assert_close(state.h, last.h, rtol=0.05, atol=0.05)


def test_a_bfloat16_module_keeps_a_float32_state():
    y, state = RNN(GRUCell(3, 5)).bfloat16()(torch.randn(2, 4, 3, dtype=torch.bfloat16))
    assert (y.dtype, state.h.dtype) == (torch.bfloat16, torch.float32)


def test_copies_and_files(rnn, tmp_path):
    x = draw(2, 6)
    expected, _ = rnn(x)
    twin = copy.deepcopy(rnn)
    torch.save(rnn.state_dict(), tmp_path / "rnn.pt")
    with torch.no_grad():
        for parameter in rnn.parameters():
            parameter.add_(1.0)
    assert not torch.allclose(rnn(x)[0], expected)
    assert torch.equal(twin(x)[0], expected)
    rnn.load_state_dict(torch.load(tmp_path / "rnn.pt", weights_only=True))
    assert torch.equal(rnn(x)[0], expected)


def test_other_cells_are_refused():
    with pytest.raises(TypeError, match="cell is a GRUCell of torch"):
        RNN(torch.nn.GRUCell(3, 5))
    with pytest.raises(TypeError, match="cell is a Linear of torch"):
        RNN(torch.nn.Linear(3, 5))


def test_wrong_shapes_are_named(rnn):
    with pytest.raises(ValueError, match=r"x is float64 \(2, 6, 4\) on cpu; expected .*d_model = 3"):
        rnn(torch.randn(2, 6, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"state\.h is float64 \(3, 5\) on cpu; expected float64 \(2, 5\)"):
        rnn(draw(2, 6), RNNState(torch.zeros(3, 5, dtype=torch.float64)))


@pytest.mark.compile
@pytest.mark.parametrize("name", CELLS)
def test_compiled_training_equals_eager(name):
    """Over some updates, so that what the Neumann series keeps is also kept in the compiled module."""
    eager = RNN(CELLS[name]()).double()
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
