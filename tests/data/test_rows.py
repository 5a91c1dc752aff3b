import pytest
from hypothesis import given
from hypothesis import strategies as st

from recurra.data.rows import RowOrder


def orders(n, batch_size, seed, world_size):
    return [
        RowOrder(n, batch_size=batch_size, seed=seed, rank=rank, world_size=world_size) for rank in range(world_size)
    ]


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 3))
def test_evaluation_counts_every_sample_once_in_order(n, per_rank, world_size):
    ranks = orders(n, per_rank * world_size, None, world_size)
    assert len({len(order) for order in ranks}) == 1
    counted = []
    for step in range(len(ranks[0])):
        shares = [order.rows(4, step) for order in ranks]
        assert len({len(rows) for rows, _ in shares}) == 1
        counted += [row for rows, n_counted in shares for row in rows[:n_counted]]
        assert all(0 <= row < n for rows, _ in shares for row in rows)
    assert counted == list(range(n))


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 3), st.integers(0, 5))
def test_training_is_a_permutation_but_for_a_remainder(n, per_rank, world_size, epoch):
    ranks = orders(n, per_rank * world_size, 7, world_size)
    taken = []
    for step in range(len(ranks[0])):
        for order in ranks:
            rows, n_counted = order.rows(epoch, step)
            assert n_counted == len(rows) > 0
            taken += rows
    assert len(set(taken)) == len(taken) == n - n % (per_rank * world_size) % world_size
    assert set(taken) <= set(range(n))


def test_the_number_of_ranks_does_not_change_a_step():
    alone, shared = orders(13, 6, 3, 1)[0], orders(13, 6, 3, 3)
    assert alone.rows(2, 1)[0] == [row for order in shared for row in order.rows(2, 1)[0]]
    assert alone.rows(0, 0) != alone.rows(1, 0)
    assert alone.training
    assert alone.rows_here == 6
    assert shared[0].rows_here == 2


def test_steps_outside_an_epoch():
    order = RowOrder(5, batch_size=2, seed=None)
    assert not order.training
    with pytest.raises(IndexError, match=r"0\.\.2"):
        order.rows(0, 3)
    with pytest.raises(ValueError, match="epoch"):
        order.rows(-1, 0)
