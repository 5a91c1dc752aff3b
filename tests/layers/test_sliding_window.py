"""Sliding windows: pieces of queries and the keys that they see."""

import pytest

from recurra.layers.attention import windows


@pytest.mark.parametrize("n_before", [0, 1, 3, 7])
@pytest.mark.parametrize("n_queries", [0, 1, 4, 9])
@pytest.mark.parametrize("window", [1, 4, 100])
def test_every_query_is_in_one_piece_with_all_that_it_sees_and_little_more(n_before, n_queries, window):
    pieces = list(windows(n_queries, n_before + n_queries, window))
    assert [query for start, stop, _, _ in pieces for query in range(start, stop)] == list(range(n_queries))
    for start, stop, first, last in pieces:
        seen = {
            key
            for query in range(n_before + start, n_before + stop)
            for key in range(query + 1)
            if query - key < window
        }
        assert set(range(first, last)) == seen
        assert last - first < 2 * window
