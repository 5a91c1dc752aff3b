"""How a stream splits into segments or windows, and which keys a query sees."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recurra.layers.attention import AttentionWindow, windows


@given(n_steps=st.integers(1, 60), segment_length=st.integers(1, 13), data=st.data())
def test_pieces_end_at_the_borders_of_segments(n_steps, segment_length, data):
    position = data.draw(st.integers(0, segment_length - 1))
    pieces = AttentionWindow(segment_length, 3).pieces(n_steps, position)
    assert sum(pieces) == n_steps
    segments = [(position + step) // segment_length for step in range(n_steps)]
    assert pieces == [segments.count(segment) for segment in dict.fromkeys(segments)]


@pytest.mark.parametrize("same_length", [False, True])
@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 1), (1, 6), (3, 3), (4, 9)])
def test_a_query_sees_the_past_and_itself(same_length, n_queries, n_keys):
    masked = AttentionWindow(4, 5, same_length).masked(n_queries, n_keys, torch.device("cpu"))
    for query in range(n_queries):
        for key in range(n_keys):
            distance = (n_keys - n_queries + query) - key
            assert bool(masked[query, key]) == (distance < 0 or (same_length and distance >= 5))


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({"segment_length": 0}, "segment_length is 0; expected at least 1"),
        ({"segment_length": -3}, "segment_length is -3"),
        ({"mem_len": -1}, "mem_len is -1; expected at least 0"),
        ({"mem_len": 0, "same_length": True}, "mem_len is 0; expected at least 1 with same_length"),
        ({"clamp_len": 0}, "clamp_len is 0; expected at least 1, or None"),
        ({"clamp_len": -1}, "clamp_len is -1"),
    ],
)
def test_lengths_out_of_range_are_refused(lengths, message):
    with pytest.raises(ValueError, match=message):
        AttentionWindow(**{"segment_length": 4, "mem_len": 5, **lengths})


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
