import numpy as np
import pytest

from recurra.data.batches import _epoch_permutation, random_generator


def test_every_place_has_numbers_of_its_own():
    places = [(0, 1), (0, 2), (1, 1), (0, 1, 0), (0, 1, 0, 0), (0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0)]
    draws = [tuple(random_generator(*place).integers(0, 2**62, size=4)) for place in places]
    assert len(set(draws)) == len(places)
    assert draws == [tuple(random_generator(*place).integers(0, 2**62, size=4)) for place in places]


def test_permutations_are_whole_fresh_and_read_only():
    first = _epoch_permutation(30, 5, 0)
    assert sorted(first) == list(range(30))
    for other in (_epoch_permutation(30, 5, 1), _epoch_permutation(30, 6, 0)):
        assert not np.array_equal(first, other)
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1
