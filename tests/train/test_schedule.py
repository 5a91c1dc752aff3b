import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recurra.train.config import ScheduleConfig
from recurra.train.optimizer import learning_rate_factor


def test_the_cosine_ends_at_the_floor():
    config = ScheduleConfig(warmup_steps=10, final_fraction=0.1)
    assert learning_rate_factor(10, 110, config) == 1.0
    assert learning_rate_factor(60, 110, config) == pytest.approx(0.55, abs=1e-12)
    assert learning_rate_factor(35, 110, config) == pytest.approx(
        0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi / 4)), abs=1e-12
    )
    assert learning_rate_factor(110, 110, config) == pytest.approx(0.1, abs=1e-12)
    assert learning_rate_factor(500, 110, config) == pytest.approx(0.1, abs=1e-12)


def test_wsd_stays_at_the_peak_and_falls_along_a_line_at_the_end():
    config = ScheduleConfig(shape="wsd", warmup_steps=10, decay_fraction=0.2, final_fraction=0.5)
    assert {learning_rate_factor(step, 100, config) for step in range(10, 81)} == {1.0}
    assert [learning_rate_factor(step, 100, config) for step in (85, 90, 100, 500)] == pytest.approx(
        [0.875, 0.75, 0.5, 0.5], abs=1e-12
    )
    # the decay never begins inside the warm-up
    assert learning_rate_factor(10, 11, config) == 1.0
    assert learning_rate_factor(55, 100, ScheduleConfig(shape="wsd", warmup_steps=10, decay_fraction=1.0)) == 0.5


@given(
    warmup=st.integers(0, 50),
    total=st.integers(1, 200),
    final=st.floats(0, 1),
    shape=st.sampled_from(["cosine", "wsd"]),
)
def test_it_rises_then_falls_and_stays_between_floor_and_peak(warmup, total, final, shape):
    config = ScheduleConfig(shape=shape, warmup_steps=warmup, final_fraction=final)
    factors = [learning_rate_factor(step, total, config) for step in range(total)]
    rising, falling = factors[:warmup], factors[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert all(0 < factor <= 1 for factor in rising)
    assert all(final - 1e-12 <= factor <= 1 for factor in falling)


def test_the_rate_falls_at_the_ends_of_the_epochs():
    config = ScheduleConfig(shape="steps", steps=[2, 5], factor=0.1)
    factors = [learning_rate_factor(step, 24, config, steps_per_epoch=4) for step in range(24)]
    assert factors == [1.0] * 8 + [0.1] * 12 + [0.1**2] * 4
