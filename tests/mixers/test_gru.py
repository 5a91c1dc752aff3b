"""The GRU mixer is torch.nn.GRU under the one contract."""

import pytest
import torch
from torch import nn

from recurra.mixers import GRU, GRUState, create_mixer


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
    assert torch.equal(torch.cat([first, layer(x[:, 2:], state)[0]], 1), y)


def test_autocast_leaves_the_recurrence_alone(layer):
    layer, x = layer.float(), torch.randn(2, 6, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x)[0], layer(x)[0])
        found = layer(x)[0]
    assert torch.equal(found, layer(x)[0])


def test_bad_sizes_are_refused(layer):
    with pytest.raises(ValueError, match="d_model is 0"):
        GRU(0)
    with pytest.raises(ValueError, match=r"state\.h is float64 \(3, 5\) on cpu; expected float64 \(2, 5\)"):
        layer(torch.randn(2, 3, 5, dtype=torch.float64), GRUState(torch.zeros(3, 5, dtype=torch.float64)))
