"""The step sizes at the start."""

import math

import pytest
from torch.nn import functional

from recurra.layers.state_space import inverse_softplus_of_steps


def test_steps_are_log_uniform_behind_softplus():
    step = functional.softplus(inverse_softplus_of_steps(20_000, 0.001, 0.1).double()).log10()
    assert step.min().item() == pytest.approx(-3, abs=0.001)
    assert step.max().item() == pytest.approx(-1, abs=0.001)
    assert step.mean().item() == pytest.approx(-2, abs=0.02)
    assert step.std().item() == pytest.approx(2 / math.sqrt(12), rel=0.02)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0.0, 1.0), "min_step is 0.0; expected a finite number above 0"),
        ((0.1, math.inf), "max_step is inf; expected a finite number above 0"),
        ((0.2, 0.1), "min_step is 0.2; expected at most max_step = 0.1"),
    ],
)
def test_bad_step_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        inverse_softplus_of_steps(3, *sizes)
