"""The GRU mixer is torch.nn.GRU under the one contract."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from recurra.mixers.base import create_mixer
from recurra.mixers.gru import GRUState
from recurra.ops.cells.gru import HiddenWeights, gru_after_reference


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return create_mixer("gru", 5).double()


def test_it_is_torchs_gru(layer):
    theirs = nn.GRU(5, 5, batch_first=True).double()
    with torch.no_grad():
        for name, parameter in layer.cell.named_parameters():
            getattr(theirs, f"{name}_l0").copy_(parameter)
    x, h = torch.randn(3, 7, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    y, state = layer(x, GRUState(h))
    expected, last = theirs(x, h[None])
    assert torch.equal(y, expected)
    assert torch.equal(state.h, last[0])


def test_autocast_leaves_the_recurrence_alone(layer):
    """The products with x are bfloat16; what follows is the float32 recurrence over them, however it is cut."""
    layer, x = layer.float(), torch.randn(2, 6, 5)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x)
        projected = functional.linear(x, layer.cell.weight_ih, layer.cell.bias_ih)
        first, between = layer(x[:, :2])
        second, _ = layer(x[:, 2:], between)
        with torch.no_grad():
            one, _ = layer(x[:, :1])
    assert projected.dtype == torch.bfloat16
    weights = HiddenWeights(layer.cell.weight_hh, layer.cell.bias_hh)
    expected, last = gru_after_reference(projected.float(), torch.zeros(2, 5), weights)
    torch.testing.assert_close(state.h, last, rtol=0, atol=1e-6)
    torch.testing.assert_close(y, expected.bfloat16(), rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(torch.cat([first, second], 1), y, rtol=0, atol=2e-2)
    torch.testing.assert_close(one, y[:, :1], rtol=1e-2, atol=1e-6)
