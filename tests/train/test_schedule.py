import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from recurra.data.batches import Batch
from recurra.train.config import OptimizerConfig, ScheduleConfig
from recurra.train.optimizer import build_optimizer, learning_rate_factor, mean_relative_length, scale_learning_rates


def test_the_warm_up_is_a_line_from_its_first_step_to_the_peak():
    config = ScheduleConfig(warmup_steps=4)
    assert [learning_rate_factor(step, 100, config) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


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


def test_a_long_run_with_wsd_has_the_short_one_in_it():
    config = ScheduleConfig(shape="wsd", warmup_steps=10, decay_fraction=0.1)
    short, long = ([learning_rate_factor(step, end, config) for step in range(101)] for end in (100, 1000))
    assert short[:91] == long[:91]
    assert all(low < high for low, high in zip(short[91:], long[91:], strict=True))


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


class ShortAndLong:
    """A source whose steps are in turn half as long and twice as long as usual."""

    batch_size = 1

    def __len__(self) -> int:
        return 6

    def batch(self, epoch: int, step: int) -> Batch:
        raise NotImplementedError

    def relative_length(self, epoch: int, step: int) -> float:
        return 2.0 if (epoch + step) % 2 else 0.5


def test_the_length_of_an_update_is_the_mean_of_its_batches():
    source = ShortAndLong()
    assert mean_relative_length(source, 0, [0]) == 0.5
    assert mean_relative_length(source, 1, [0]) == 2.0
    assert mean_relative_length(source, 0, range(1, 4)) == 1.5


def test_each_group_is_scaled_from_its_own_peak(toy_model: nn.Module):
    config = OptimizerConfig(learning_rate=0.1, transition_learning_rate=0.02)
    optimizer = build_optimizer(toy_model, config)
    for factor in (0.5, 0.25):
        scale_learning_rates(optimizer, factor)
        rates = {group["lr"] for group in optimizer.param_groups}
        assert rates == {0.1 * factor, 0.02 * factor}
