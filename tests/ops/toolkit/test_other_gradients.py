"""Functions with a kernel for each pass: gradients of some inputs, second ones, and several at once."""

import pytest
import torch

from recurra.layers.convolution import _shifted_products_reference, shifted_products
from recurra.layers.features import _positive_features_reference, positive_features
from recurra.layers.turned import _turned_reference, turned
from recurra.ops.cells.gru import (
    GRUCell,
    HiddenWeights,
    RecurrentWeights,
    gru_after,
    gru_after_reference,
    gru_sequence,
    gru_sequence_reference,
)
from recurra.ops.cells.slstm import SLSTMParts, slstm_sequence, slstm_sequence_reference


def slstm(function):
    def call(projected, weights, c, n, m, h):
        y, last = function(projected, weights, SLSTMParts(c, 1 + n.abs(), m, h))
        return y, *last

    return call


CASES = {  # the function, its reference, the shapes of the inputs that have gradients
    "turned": (turned, _turned_reference, [(2, 4, 2, 6), (2, 4, 2, 6), (2, 4, 2, 2), (2, 4, 2, 1)]),
    "positive features": (
        lambda *x: positive_features(*x, torch.zeros(2, 2, 5)),
        lambda *x: _positive_features_reference(*x, torch.zeros(2, 2, 5)),
        [(2, 4, 2, 5), (2, 4, 2, 5), (2, 4, 2)],
    ),
    "shifted products": (
        lambda *x: (shifted_products(*x),),
        lambda *x: (_shifted_products_reference(*x),),
        [(2, 4, 5), (2, 2, 5), (3, 5), (5,)],
    ),
    "sLSTM": (slstm(slstm_sequence), slstm(slstm_sequence_reference), [(2, 4, 4, 2, 3), (2, 3, 12), *[(2, 2, 3)] * 4]),
    "GRU": (
        lambda p, h, *w: gru_sequence(GRUCell(1, 3), p, h, RecurrentWeights(*w)),
        lambda p, h, *w: gru_sequence_reference(GRUCell(1, 3), p, h, RecurrentWeights(*w)),
        [(2, 4, 9), (2, 3), (6, 3), (3, 3)],
    ),
    "GRU, reset after": (
        lambda p, h, *w: gru_after(p, h, HiddenWeights(*w)),
        lambda p, h, *w: gru_after_reference(p, h, HiddenWeights(*w)),
        [(2, 4, 9), (2, 3), (9, 3), (9,)],
    ),
}


@pytest.fixture(params=CASES)
def case(request):
    *functions, shapes = CASES[request.param]
    return functions, [torch.randn(shape).requires_grad_() for shape in shapes]


def loss_of(outputs):
    return sum((torch.arange(x.numel()).sin().view_as(x) * x).sum() for x in outputs if x.requires_grad)


def require_near(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5 * max(1.0, other.abs().max().item()))


def test_what_needs_no_gradient_gets_none(case):
    functions, inputs = case
    for frozen in inputs:
        frozen.requires_grad_(False)
        leaves = [x for x in inputs if x.requires_grad]
        require_near(*(torch.autograd.grad(loss_of(f(*inputs)), leaves, materialize_grads=True) for f in functions))
        frozen.requires_grad_()


def test_second_derivatives(case):
    functions, inputs = case
    found = []
    for function in functions:
        loss = loss_of(x.sin() for x in function(*inputs))
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        found.append((*first, *torch.autograd.grad(sum(x.sin().sum() for x in first), inputs)))
    require_near(*found)


def test_a_batch_of_gradients(case):
    (function, _), inputs = case
    y = function(*inputs)[0]
    several = torch.randn(3, *y.shape)
    options = {"retain_graph": True, "materialize_grads": True}
    backward = lambda gradient: torch.autograd.grad(y, inputs, gradient, **options)  # noqa: E731
    found = torch.func.vmap(backward)(several)
    for i, gradient in enumerate(several):
        require_near([one[i] for one in found], backward(gradient))
