"""The GRU mixer is torch.nn.GRU under the one contract."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from recurra.mixers.gru import GRU, GRUState
from recurra.mixers.registry import create_mixer
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


def test_the_start_of_a_stream_is_zero(layer):
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    assert torch.equal(layer(x)[0], layer(x, GRUState(x.new_zeros(2, 5)))[0])


def test_no_steps_leave_the_state_alone(layer):
    h = torch.randn(2, 5, dtype=torch.float64)
    y, state = layer(torch.randn(2, 0, 5, dtype=torch.float64), GRUState(h))
    assert y.shape == (2, 0, 5)
    assert torch.equal(state.h, h)


def test_the_state_is_float32_where_the_weights_are_bfloat16(layer):
    layer, x = layer.bfloat16(), torch.randn(2, 6, 5, dtype=torch.bfloat16)
    y, state = layer(x)
    assert (y.dtype, state.h.dtype) == (torch.bfloat16, torch.float32)
    first, state = layer(x[:, :2])
    # the product of fewer rows may round x's projection to the next bfloat16
    torch.testing.assert_close(torch.cat([first, layer(x[:, 2:], state)[0]], 1), y, rtol=0, atol=2e-2)


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


def test_bad_sizes_are_refused(layer):
    with pytest.raises(ValueError, match="d_model is 0"):
        GRU(0)
    with pytest.raises(ValueError, match=r"state\.h is float64 \(3, 5\) on cpu; expected float64 \(2, 5\)"):
        layer(torch.randn(2, 3, 5, dtype=torch.float64), GRUState(torch.zeros(3, 5, dtype=torch.float64)))
