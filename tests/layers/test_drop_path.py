"""Stochastic depth."""

import pytest
import torch

from recurra.layers.dropout import DropPath


def test_whole_rows_are_dropped_and_the_others_scaled():
    y = DropPath(0.25)(torch.ones(4000, 3, 2))
    rows = y.flatten(1)
    assert (rows == rows[:, :1]).all()
    assert set(rows[:, 0].tolist()) == {0.0, torch.tensor(1.0).div(0.75).item()}
    assert (rows[:, 0] == 0).float().mean().item() == pytest.approx(0.25, abs=0.03)


def test_evaluation_and_p_of_0_give_x_itself():
    x = torch.randn(5, 2)
    assert DropPath(0.5).eval()(x) is x
    assert DropPath(0.0)(x) is x


@pytest.mark.parametrize("p", [-0.1, 1.0])
def test_p_must_be_a_probability_below_1(p):
    with pytest.raises(ValueError, match=f"p is {p}; expected a probability"):
        DropPath(p)
