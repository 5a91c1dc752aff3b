"""The kernels of torch.nn.GRU's steps, beyond what tests/layers/test_layer_kernels.py compares with the reference."""

import pytest
import torch

from recurra.ops.cells.gru import HiddenWeights, gru_after, gru_after_reference


def draw(batch, length, size, dtype=torch.float32):
    shapes = [(batch, length, 3 * size), (batch, size), (3 * size, size), (3 * size,)]
    drawn = [torch.randn(shape) * size**-0.25 for shape in shapes]
    return [drawn[0].to(dtype).requires_grad_(), *(x.requires_grad_() for x in drawn[1:])]


@torch.no_grad()
def outputs(function, inputs):
    return function(inputs[0], inputs[1], HiddenWeights(*inputs[2:]))


def run(function, inputs):
    y, last = function(inputs[0], inputs[1], HiddenWeights(*inputs[2:]))
    loss = (torch.sin(torch.arange(y.numel())).view_as(y) * y).sum() + last.square().sum()
    return y, last, *torch.autograd.grad(loss, inputs)


def test_bfloat16_inputs_beside_a_float32_recurrence():
    inputs = draw(3, 7, 9, torch.bfloat16)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    found, expected = run(gru_after, inputs), run(gru_after_reference, wide)
    for mine, right in zip(found[:2], expected):
        torch.testing.assert_close(mine.double(), right, rtol=0, atol=1e-6)
    assert found[2].dtype == torch.bfloat16
    for mine, right in zip(found[2:], expected[2:]):
        torch.testing.assert_close(mine.double(), right, rtol=0, atol=1e-2 * max(1, right.abs().max().item()))


@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_threads_share_the_sequences(trains, set_threads):
    inputs, function = draw(7, 12, 40), run if trains else outputs
    one = function(gru_after, inputs)
    set_threads(2)
    two = function(gru_after, inputs)
    for mine, other in zip(one, two):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6 * max(1, mine.abs().max().item()))


@pytest.mark.parametrize(("place", "name"), enumerate(["projected", "projected", "weights.weight", "weights.bias"]))
def test_tensors_of_other_sizes_are_refused(place, name):
    """A state of another size makes the projections wrong: they are three times as wide as it."""
    inputs = draw(2, 3, 4)
    inputs[place] = torch.cat([inputs[place], inputs[place][..., :1]], -1)
    with pytest.raises(ValueError, match=rf"{name} is float32 \(.*\) on cpu; expected"):
        outputs(gru_after, inputs)
