import pytest
from tools.pages.benchmarks.limits import next_cost


@pytest.mark.parametrize(
    ("costs", "following"),
    [
        ([3.0], 12.0),  # nothing is known of its growth
        ([1.0, 2.0], 8.0),
        ([1.0, 3.0, 9.0], 27.0),
        ([7.0, 1.0, 2.0, 9.0], 27.0),  # only the last two doublings count
        ([1.0, 1.0, 1.0], 2.0),  # flat so far, but it may be about to grow with L
        ([1.0, 8.0, 64.0], 256.0),  # no way here costs more than L^2
        ([0.0, 1.0, 2.0], 8.0),
    ],
)
def test_the_next_cost_follows_the_growth(costs, following):
    assert next_cost(costs) == pytest.approx(following)


def test_without_costs_there_is_no_guess():
    with pytest.raises(ValueError, match="costs is empty"):
        next_cost([])
