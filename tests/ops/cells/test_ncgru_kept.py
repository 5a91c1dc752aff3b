"""What an NCGRU's calls without gradients share: its orthogonal matrix, kept until its A changes."""

import copy

import pytest
import torch
from torch.func import functional_call

from recurra.ops.cells.orthogonal import Cayley, NCGRUCell

ORIGINAL = "parametrizations.candidate_weight.original"


@pytest.fixture
def cell() -> NCGRUCell:
    return NCGRUCell(3, 5, rho=1).double()


@pytest.fixture
def made(monkeypatch) -> list[Cayley]:
    """The transforms that form a matrix, one entry a time."""
    calls, transform = [], Cayley.forward
    monkeypatch.setattr(Cayley, "forward", lambda self, entries: calls.append(self) or transform(self, entries))
    return calls


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)


def test_without_gradients_it_is_made_once(cell, made, inputs):
    with torch.inference_mode():
        for _ in range(3):
            cell(*inputs)
    with torch.no_grad():
        cell(*inputs)
        assert cell.recurrent_weights(torch.float32).candidate.dtype == torch.float32
    assert len(made) == 1
    cell(*inputs)
    cell(*inputs)
    assert len(made) == 3


def test_gradients_flow_whatever_ran_before_without_them(cell, inputs):
    expected = torch.autograd.grad(cell(*inputs).sin().sum(), cell.parameters())
    with torch.no_grad():
        cell(*inputs)
    with torch.inference_mode():
        cell(*inputs)
    found = torch.autograd.grad(cell(*inputs).sin().sum(), cell.parameters())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def other_entries(cell):
    return cell.get_parameter(ORIGINAL) + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda cell: cell.get_parameter(ORIGINAL).add_(1.0),
        lambda cell: cell.load_state_dict(cell.state_dict() | {ORIGINAL: other_entries(cell)}),
        lambda cell: setattr(cell.get_parameter(ORIGINAL), "data", other_entries(cell)),
        lambda cell: setattr(cell.get_submodule(ORIGINAL.rpartition(".")[0]), "original", nn_parameter(cell)),
    ],
    ids=["in place", "loading", "other memory", "another parameter"],
)
@torch.no_grad()
def test_it_follows_its_parameter(cell, inputs, change):
    before, twin = cell(*inputs), copy.deepcopy(cell)
    change(cell)
    fresh = NCGRUCell(3, 5, rho=1).double()
    fresh.load_state_dict(cell.state_dict())
    assert torch.equal(cell(*inputs), fresh(*inputs))
    assert torch.equal(twin(*inputs), before)


def nn_parameter(cell):
    return torch.nn.Parameter(other_entries(cell))


@torch.no_grad()
def test_weights_of_a_functional_call_are_its_own(cell, inputs):
    other = copy.deepcopy(cell)
    other.get_parameter(ORIGINAL).add_(1.0)
    expected = cell(*inputs), other(*inputs)
    replaced = functional_call(cell, dict(other.named_parameters()), inputs)
    torch.testing.assert_close((replaced, cell(*inputs)), (expected[1], expected[0]), rtol=0, atol=0)


def test_a_call_with_gradients_forgets_it(cell, inputs):
    """Some write weights without a trace, FSDP among them."""
    with torch.no_grad():
        before = cell(*inputs)
        cell.get_parameter(ORIGINAL).data.add_(1.0)
        cell.get_parameter(ORIGINAL).requires_grad_()
    cell(*inputs)
    with torch.no_grad():
        assert not torch.equal(cell(*inputs), before)
