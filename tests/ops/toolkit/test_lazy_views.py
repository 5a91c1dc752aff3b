"""Lazily negated and conjugated tensors: kernels read memory, which holds other numbers than these tensors have."""

import pytest
import torch
from torch import Tensor

from recurra import gate_loop, linear_scan
from recurra.layers import ShortConvolution
from recurra.layers.cross_entropy import cross_entropy
from recurra.mixers import RNN
from recurra.ops.cells import GRUCell


def negated(*shape: int) -> Tensor:
    x = torch.conj(torch.rand(*shape, dtype=torch.complex64)).imag
    assert x.is_neg()
    return x


def conjugated(*shape: int) -> Tensor:
    return torch.polar(torch.rand(shape), torch.rand(shape)).conj()


FUNCTIONS = {
    "linear_scan": lambda x: linear_scan(x, x),
    "gate_loop": lambda x: gate_loop(*(x[:, :, None],) * 4),
    "convolution": lambda x: ShortConvolution(4, 3)(x),
    "cross-entropy": lambda x: cross_entropy(x.flatten(0, 1), torch.zeros(x.shape[0] * x.shape[1], dtype=torch.int64)),
    "gru": lambda x: RNN(GRUCell(4, 4))(x),
}


def numbers(function, x: Tensor, trains: bool) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.set_grad_enabled(trains):
        return [y for y in torch.utils._pytree.tree_leaves(function(x)) if isinstance(y, Tensor)]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_negated_input_is_what_it_stands_for(name, trains):
    x = negated(2, 4, 4)
    for y, expected in zip(numbers(FUNCTIONS[name], x, trains), numbers(FUNCTIONS[name], x.resolve_neg(), trains)):
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("name", ["linear_scan", "gate_loop"])
def test_a_conjugated_input_is_what_it_stands_for(name):
    x = conjugated(2, 4, 4)
    for y, expected in zip(numbers(FUNCTIONS[name], x, False), numbers(FUNCTIONS[name], x.resolve_conj(), False)):
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("name", ["linear_scan", "gate_loop"])
def test_one_negated_channel_is_what_it_stands_for(name):
    """Its last dimension counts as dense, so that no copy resolves it."""
    x = negated(2, 4, 1)
    for y, expected in zip(numbers(FUNCTIONS[name], x, False), numbers(FUNCTIONS[name], x.resolve_neg(), False)):
        torch.testing.assert_close(y, expected)
