"""The memory that the kernels of cells write into is their own, whatever is contiguous already."""

import pytest
import torch

from recurra import create_mixer


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", ["gru", "slstm"])
def test_a_step_of_one_sequence_leaves_the_weights_alone(name, gradients):
    layer = create_mixer(name, 8)
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    state = None
    with torch.set_grad_enabled(gradients):
        for _ in range(3):
            _, state = layer(torch.randn(1, 1, 8), state)
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())


def test_steps_one_at_a_time_have_the_gradients_of_all_at_once():
    layer, x = create_mixer("gru", 4), torch.randn(1, 5, 4)
    torch.nn.init.normal_(layer.cell.bias_hh)
    outputs, state = [], None
    for step in x.split(1, 1):
        y, state = layer(step, state)
        outputs.append(y)
    expected, _ = layer(x)
    weights = list(layer.parameters())
    found = torch.autograd.grad(torch.cat(outputs, 1).square().sum(), weights)
    for one, other in zip(found, torch.autograd.grad(expected.square().sum(), weights)):
        torch.testing.assert_close(one, other)
