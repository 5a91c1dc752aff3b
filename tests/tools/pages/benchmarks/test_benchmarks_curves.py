import pytest
from tools.pages.benchmarks.curves import Stretch

from tools.pages.benchmarks import curves


def test_growth_is_the_power_over_the_last_two_doublings(sweep):
    assert curves.growth(sweep, "square") == pytest.approx(2)
    assert curves.growth(sweep, 'mode "scan"') == pytest.approx(1)
    assert curves.growth(sweep, "jax") is None


def test_a_curve_is_flat_until_it_has_doubled(sweep):
    assert curves.flat_up_to(sweep, 'mode "chunk"') == 2**9  # 2 ms up to 2^8, 2.05 ms, then 4.1 ms
    assert curves.flat_up_to(sweep, "floor") == 2**7
    assert curves.flat_up_to(sweep, "jax") is None


def test_a_curve_that_comes_down_again_is_not_flat_further_on(sweep):
    sweep["times"]["256"]['mode "chunk"']["median"] = 1
    assert curves.flat_up_to(sweep, 'mode "chunk"') == 2**7


def test_memory_a_step_is_taken_at_the_longest_length(sweep):
    assert curves.memory_a_step(sweep, 'mode "chunk"') == 2**20 / 2**9
    sweep["memory"]['mode "chunk"'][str(2**12)] = 0.9
    assert curves.memory_a_step(sweep, 'mode "chunk"') is None
    assert curves.memory_a_step(sweep, "jax") is None


def test_the_quickest_leaves_out_the_floor_and_joins_neighbours(sweep):
    assert curves.quickest(sweep) == [Stretch(2**7, 2**7, 'mode "scan"'), Stretch(2**8, 2**12, 'mode "chunk"')]
    sweep["times"]["4096"] = {"floor": sweep["times"]["4096"]["floor"]}
    assert curves.quickest(sweep)[-1] == Stretch(2**12, 2**12, "")


def test_auto_is_held_against_the_quickest_mode_not_against_others(sweep):
    sweep["times"]["128"]["square"]["median"] = 1e-9
    found = curves.auto_over_quickest(sweep)
    assert found[2**7] == ('mode "chunk"', 'mode "scan"', pytest.approx(2e-3 / (128 * 1.2e-5)))
    assert found[2**12] == ('mode "chunk"', 'mode "chunk"', 1)
    sweep["auto"]["128"] = "fused"  # not measured
    assert 2**7 not in curves.auto_over_quickest(sweep)


def test_the_floor_moves_what_it_says(sweep):
    assert curves.gigabytes_a_second(sweep)[2**9] == pytest.approx(12_000 / 1e-6 / 1e9)


def test_points_with_a_wide_spread_are_counted(record):
    assert curves.spread(record) == (0, 22)
    record["sweeps"]["one"]["times"]["512"]["floor"]["high"] *= 1.2
    assert curves.spread(record) == (1, 22)
