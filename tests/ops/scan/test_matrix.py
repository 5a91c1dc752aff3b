"""The scan with one dense matrix, against a plain loop and the general associative scan."""

import pytest
import torch
from tests.gradients import require_same_gradients
from torch.utils.flop_counter import FlopCounterMode

from recurra.ops.scan.reference import associative_scan, matrix_recurrence, matrix_scan


def draw(length, size=5, batch=3):
    matrix = 0.9 * torch.nn.init.orthogonal_(torch.empty(size, size, dtype=torch.float64))
    matrix = matrix + torch.randn_like(matrix) * 0.02
    b, h0 = torch.randn(batch, length, size, dtype=torch.float64), torch.randn(batch, size, dtype=torch.float64)
    return [tensor.requires_grad_() for tensor in (matrix, b, h0)]


def loop(matrix, b, h):
    states = []
    for t in range(b.shape[1]):
        h = h @ matrix.T + b[:, t]
        states.append(h)
    return torch.stack(states, 1)


def by_associative_scan(matrix, b, h0):
    b = torch.cat([h0[:, None], b], 1)
    matrices = matrix.expand(*b.shape[:2], *matrix.shape)
    return associative_scan(matrix_recurrence, (matrices, b))[1][:, 1:]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 31, 64, 101])
@pytest.mark.parametrize("reference", [loop, by_associative_scan])
def test_states_and_gradients_are_the_loops(reference, length):
    inputs = draw(length)
    require_same_gradients(matrix_scan(*inputs), reference(*inputs), inputs, 1e-12)


def test_no_steps_give_no_states():
    matrix, b, h0 = draw(4)
    assert matrix_scan(matrix, b[:, :0], h0).shape == (3, 0, 5)
    assert matrix_scan(matrix, b[:0], h0[:0]).shape == (0, 4, 5)


def test_it_takes_the_work_that_the_docstring_says():
    batch, length, size = 3, 1024, 5
    matrix, b, h0 = (tensor.detach() for tensor in draw(length, size, batch))
    with FlopCounterMode(display=False) as counter:
        matrix_scan(matrix, b, h0)
    multiply_adds = counter.get_total_flops() / 2
    assert multiply_adds <= 2 * batch * length * size**2 + size**3 * 10
    assert multiply_adds >= batch * length * size**2  # the counter saw the products
