"""The learning rate in steps, and which options belong to which shape."""

import pytest

from recurra.train.config import ScheduleConfig
from recurra.train.optimizer import learning_rate_factor


def test_the_rate_falls_at_the_ends_of_the_epochs():
    config = ScheduleConfig(shape="steps", steps=[2, 5], factor=0.1)
    factors = [learning_rate_factor(step, 24, config, steps_per_epoch=4) for step in range(24)]
    assert factors == [1.0] * 8 + [0.1] * 12 + [0.1**2] * 4


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"steps": [3]}, "steps"),
        ({"factor": 0.5}, "factor"),
        ({"shape": "steps", "steps": [3], "final_fraction": 0.1}, "final_fraction"),
        ({"decay_fraction": 0.2}, "decay_fraction"),
        ({"shape": "wsd", "factor": 0.5}, "factor"),
    ],
)
def test_an_option_of_the_other_shape_is_refused(options, field):
    with pytest.raises(ValueError, match=rf"^schedule\.{field} is .*; expected null when schedule\.shape is"):
        ScheduleConfig(**options)


@pytest.mark.parametrize("steps", [None, [], [0], [3, 3], [5, 2]])
def test_steps_must_rise_from_one(steps):
    with pytest.raises(ValueError, match=r"^schedule\.steps is .*; expected increasing numbers of epochs"):
        ScheduleConfig(shape="steps", steps=steps)


@pytest.mark.parametrize("factor", [0.0, 1.0, 2.0])
def test_the_factor_must_make_it_fall(factor):
    with pytest.raises(ValueError, match=rf"^schedule\.factor is {factor}; expected a factor in \(0, 1\)"):
        ScheduleConfig(shape="steps", steps=[1], factor=factor)
