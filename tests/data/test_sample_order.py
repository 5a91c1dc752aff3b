from hypothesis import given
from hypothesis import strategies as st

from recurra.data.batches import SampleOrder


def orders(n, batch_size, seed, world_size):
    return [
        SampleOrder(n, batch_size=batch_size, seed=seed, rank=rank, world_size=world_size) for rank in range(world_size)
    ]


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 3))
def test_evaluation_counts_every_sample_once_in_order(n, per_rank, world_size):
    ranks = orders(n, per_rank * world_size, None, world_size)
    assert len({len(order) for order in ranks}) == 1
    counted = []
    for step in range(len(ranks[0])):
        shares = [order.samples(4, step) for order in ranks]
        assert len({len(samples) for samples, _ in shares}) == 1
        counted += [sample for samples, n_counted in shares for sample in samples[:n_counted]]
        assert all(0 <= sample < n for samples, _ in shares for sample in samples)
    assert counted == list(range(n))


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 3), st.integers(0, 5))
def test_training_is_a_permutation_but_for_a_remainder(n, per_rank, world_size, epoch):
    ranks = orders(n, per_rank * world_size, 7, world_size)
    taken = []
    for step in range(len(ranks[0])):
        for order in ranks:
            samples, n_counted = order.samples(epoch, step)
            assert n_counted == len(samples) > 0
            taken += samples
    assert len(set(taken)) == len(taken) == n - n % (per_rank * world_size) % world_size
    assert set(taken) <= set(range(n))


def test_the_number_of_ranks_does_not_change_a_step():
    alone, shared = orders(13, 6, 3, 1)[0], orders(13, 6, 3, 3)
    assert alone.samples(2, 1)[0] == [sample for order in shared for sample in order.samples(2, 1)[0]]
    assert alone.samples(0, 0) != alone.samples(1, 0)
    assert alone.training
    assert alone.batch_size == 6
    assert shared[0].batch_size == 2
