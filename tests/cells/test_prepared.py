"""What cells share in a block of calls: made once, for this thread, this cell and this gradient mode."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.func import functional_call

from recurra.cells import Cayley, NCGRUCell, cells_prepared_once

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


def test_once_a_block_and_no_longer(cell, made, inputs):
    with cells_prepared_once():
        for _ in range(3):
            cell(*inputs)
        with cells_prepared_once():
            cell(*inputs)
        cell(*inputs)
        assert len(made) == 1
        cell.recurrent_weights(torch.float32)
        assert len(made) == 2
    with pytest.raises(RuntimeError, match="stop"), cells_prepared_once():
        raise RuntimeError("stop")
    cell(*inputs)
    cell(*inputs)
    assert len(made) == 4


def test_gradients_flow_whatever_ran_before_without_them(cell, inputs):
    expected = torch.autograd.grad(cell(*inputs).sin().sum(), cell.parameters())
    with cells_prepared_once():
        with torch.no_grad():
            cell(*inputs)
        with torch.inference_mode():
            cell(*inputs)
        found = torch.autograd.grad(cell(*inputs).sin().sum(), cell.parameters())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_copy_and_other_weights_have_their_own(cell, inputs):
    other = copy.deepcopy(cell)
    with torch.no_grad():
        other.get_parameter(ORIGINAL).add_(1.0)
    expected = cell(*inputs), other(*inputs)
    with cells_prepared_once():
        found = cell(*inputs), other(*inputs)
        replaced = functional_call(cell, dict(other.named_parameters()), inputs)
        again = cell(*inputs)
    torch.testing.assert_close((*found, replaced, again), (*expected, expected[1], expected[0]), rtol=0, atol=0)


def test_a_block_of_another_thread_is_not_this_ones(cell, made, inputs):
    with ThreadPoolExecutor(1) as other:
        block = cells_prepared_once()
        other.submit(block.__enter__).result()
        other.submit(torch.no_grad()(cell), *inputs).result()
        assert cell(*inputs).requires_grad
        assert len(made) == 2
        with torch.no_grad():
            cell.get_parameter(ORIGINAL).add_(1.0)
        with cells_prepared_once():
            assert torch.equal(cell(*inputs), copy.deepcopy(cell)(*inputs))
        other.submit(block.__exit__, None, None, None).result()
    cell(*inputs)
    assert len(made) == 5
