"""gru_sequence has the reference's outputs, its gradients and its second derivatives."""

import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from recurra.mixers.rnn import RNN
from recurra.ops.cells import _gru_steps as gru_steps
from recurra.ops.cells.gru import GRUCell, RecurrentWeights, gru_sequence, gru_sequence_reference

of_sequences = sys.modules["recurra.ops.cells.gru"]  # the package has its function under this name
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def draw(batch, length, size, dtype=torch.float64):
    """The arguments of a sequence; for bfloat16 as under autocast, with a float32 state."""
    wide = torch.promote_types(dtype, torch.float32)
    shapes = [(batch, length, 3 * size), (batch, size), (2 * size, size), (size, size)]
    scales = [1.0, 1.0, size**-0.5, size**-0.5]
    dtypes = [dtype, wide, dtype, dtype]
    return [(torch.randn(s) * scale).to(d).requires_grad_() for s, scale, d in zip(shapes, scales, dtypes)]


def run(function, inputs, uses="both"):
    """Outputs and gradients of a loss over the outputs, the last state, or both."""
    projected, h, *weights = inputs
    y, last = function(GRUCell(1, h.shape[1]).to(h.dtype), projected, h, RecurrentWeights(*weights))
    loss = 0.0
    if uses != "last":
        loss = loss + (torch.sin(torch.arange(y.numel())).view_as(y) * y).sum()
    if uses != "outputs":
        loss = loss + last.square().sum()
    return y, last, torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize(
    ("shape", "uses"),
    [
        *(((1, 1, 1), "both"), ((1, 9, 5), "outputs"), ((3, 1, 4), "last"), ((2, 13, 7), "both")),
        *(((17, 3, 6), "last"), ((0, 4, 3), "both")),
    ],
)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_it_is_the_reference(dtype, shape, uses):
    inputs = draw(*shape, dtype=dtype)
    y, last, gradients = run(gru_sequence, inputs, uses)
    expected_y, expected_last, expected = run(gru_sequence_reference, inputs, uses)
    torch.testing.assert_close(y, expected_y, rtol=0, atol=TOLERANCES[dtype])
    torch.testing.assert_close(last, expected_last, rtol=0, atol=TOLERANCES[dtype])
    assert torch.equal(last, y[:, -1])
    for x, gradient, reference in zip(inputs, gradients, expected):
        assert gradient.dtype == x.dtype
        scale = reference.abs().max().item() if reference.numel() else 1.0
        torch.testing.assert_close(gradient, reference, rtol=0, atol=TOLERANCES[dtype] * max(scale, 1.0))


def test_second_derivatives_of_a_loss_that_leaves_a_part_alone():
    projected, h, *weights = draw(2, 4, 3)
    cell = GRUCell(1, 3).double()
    found = []
    for function in (gru_sequence, gru_sequence_reference):
        _, last = function(cell, projected, h.detach(), RecurrentWeights(*weights))
        (first,) = torch.autograd.grad(last.square().sum(), projected, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [projected, *weights]))
    for gradient, reference in zip(*found):
        torch.testing.assert_close(gradient, reference, rtol=1e-10, atol=1e-12)


def test_outputs_may_be_changed_in_place():
    inputs = draw(1, 1, 4)
    cell = GRUCell(1, 4).double()
    y, last = gru_sequence(cell, inputs[0], inputs[1], RecurrentWeights(*inputs[2:]))
    kept = [x.clone() for x in torch.autograd.grad(y.sum() + last.sum(), inputs, retain_graph=True)]
    total = y.sum() + last.sum()
    with torch.no_grad():
        y.zero_()
        last.zero_()
    for gradient, before in zip(torch.autograd.grad(total, inputs), kept):
        torch.testing.assert_close(gradient, before, rtol=0, atol=0)


def test_a_cell_with_steps_of_its_own_takes_them():
    class Idle(GRUCell):
        def step(self, projected, h, weights):
            return h + 0.0 * super().step(projected, h, weights)

    h = torch.randn(2, 5)
    y, state = RNN(Idle(3, 5))(torch.randn(2, 4, 3), None)
    assert torch.equal(state.h, torch.zeros_like(h))
    assert torch.equal(y, torch.zeros(2, 4, 5))


@pytest.mark.parametrize(
    ("dtype", "batch", "takes"),
    [
        (torch.float32, 40, True),
        (torch.bfloat16, 32, True),
        (torch.bfloat16, 33, False),  # products in bfloat16 are faster
        (torch.float64, 2, False),
        (torch.float32, 0, False),
    ],
)
def test_kernels_take_the_steps_on_a_cpu(dtype, batch, takes):
    pytest.importorskip("numba", reason="Numba is not installed here")
    h = torch.zeros(batch, 4, dtype=torch.promote_types(dtype, torch.float32))
    kernels = of_sequences._kernels(torch.zeros(batch, 3, 12, dtype=dtype), h)
    assert kernels is (gru_steps if takes else None)


@pytest.mark.parametrize(("size", "takes"), [(1024, True), (1025, False)])
def test_kernels_take_the_steps_on_a_card(monkeypatch, size, takes):
    """There is none here: tensors without numbers stand in for those on it."""
    pytest.importorskip("triton", reason="Triton is not installed here")
    from recurra.ops.cells import _gru_triton as gru_triton

    with FakeTensorMode():
        projected = torch.empty(2, 3, 3 * size, dtype=torch.float16, device="cuda")
        h = torch.empty(2, size, device="cuda")
    assert of_sequences._kernels(projected, h) is None, "they have no numbers"
    monkeypatch.setattr(gru_steps, "has_numbers", lambda tensor: True)
    assert of_sequences._kernels(projected, h) is (gru_triton if takes else None)
