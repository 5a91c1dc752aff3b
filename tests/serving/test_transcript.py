"""What a session remembers of its text."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recurra.serving.store import READ, WRITTEN, Transcript


def of(tokens, most: int = 100) -> Transcript:
    made = Transcript(most)
    for number, token in enumerate(tokens):
        made.append(token, -0.5 * number if number else None, WRITTEN if number % 2 else READ)
    return made


def test_entries_have_log_probability_and_origin():
    (first, second) = of([7, 9]).entries(0, 2)
    assert (first[0], first[2]) == (7, READ)
    assert math.isnan(first[1])
    assert second == (9, -0.5, WRITTEN)


@given(st.integers(1, 60), st.integers(1, 9))
def test_the_last_tokens_are_kept(length, most):
    made = of(range(length), most)
    assert len(made) == length
    assert min(length, most) <= length - made.first < 2 * most or made.first == 0
    assert made.tokens(made.first, length) == list(range(made.first, length))
    with pytest.raises(LookupError):
        made.tokens(made.first - 1, length)


@given(st.lists(st.integers(0, 30), max_size=4), st.integers(1, 40))
def test_joined_parts_are_the_transcript(cuts, most):
    whole, parts, start = of(range(30), 100), [], 0
    for cut in [*sorted(cuts), 30]:
        part = whole.copy(cut).part(start)
        parts += [part] if part.tokens else []
        start = cut
    made = Transcript.from_parts(parts, most, 30)
    assert len(made) == 30
    assert made.first == max(0, 30 - most)
    assert made.tokens(made.first, 30) == list(range(made.first, 30))
    assert made.entries(29, 30) == whole.entries(29, 30)


def test_a_copy_and_a_cut_go_their_own_ways():
    whole = of(range(10))
    twin = whole.copy(4)
    twin.append(99, None, READ)
    assert twin.tokens(0, 5) == [0, 1, 2, 3, 99]
    assert whole.tokens(0, 10) == list(range(10))


def test_a_cut_before_what_is_kept_leaves_nothing_and_the_stream_goes_on_there():
    made = of(range(20), most=5)
    first = made.first
    made.cut(3)
    assert (first > 3, len(made), made.first) == (True, 3, 3)
    made.append(7, None, READ)
    assert made.tokens(3, 4) == [7]


def test_a_transcript_without_parts_continues_where_its_stream_stands():
    """One that was cut where it began has no part."""
    made = Transcript.from_parts([], 100, 25)
    assert (made.first, len(made)) == (25, 25)
    made.append(7, None, READ)
    assert made.tokens(25, 26) == [7]
