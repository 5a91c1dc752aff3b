"""Who is served next, without a model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recurra.serve._engine import LONGEST_CHUNK, SHORTEST_CHUNK, QueueFull, Scheduler, _Pace
from recurra.serve._model import StreamState
from recurra.serve._requests import _MOST_CHECKPOINTS, Request

MODEL, OTHER = object(), object()


def turn(n_tokens: int, model=MODEL, n_sequences: int = 1) -> Request:
    """A turn that reads `n_tokens` before its last one."""
    return Request(model, StreamState(None), [0] * (n_tokens + 1), [None] * n_sequences)


def test_who_has_nothing_to_read_writes_at_once():
    scheduler = Scheduler(2, 8)
    reads, writes = turn(3), turn(0)
    scheduler.add(reads)
    scheduler.add(writes)
    assert list(scheduler.admit()) == [writes]
    assert scheduler.next_chunk(False).requests == [reads]


def test_places_are_given_in_order_and_a_large_turn_is_not_overtaken():
    scheduler = Scheduler(4, 8)
    first, large, small = turn(0, n_sequences=3), turn(0, n_sequences=3), turn(0)
    for one in (first, large, small):
        scheduler.add(one)
    assert list(scheduler.admit()) == [first]
    assert (scheduler.n_streams, scheduler.n_waiting) == (3, 2)
    scheduler.release(3)
    assert list(scheduler.admit()) == [large, small]


def test_a_full_queue_refuses():
    scheduler = Scheduler(1, 2)
    scheduler.add(turn(0))
    list(scheduler.admit())
    scheduler.add(turn(0))
    scheduler.add(turn(0))
    with pytest.raises(QueueFull, match="2 requests that wait"):
        scheduler.add(turn(0))


def test_a_turn_keeps_a_bounded_number_of_marks():
    one, places = turn(0), [StreamState(None, (), n) for n in range(1000)]
    one.checkpoint_every = 16
    for place in places:
        if place.position % one.checkpoint_every == 0:
            one.add_checkpoint(place)
        assert len(one.checkpoints) < _MOST_CHECKPOINTS
    one.checkpoint_every = 1
    for place in places:
        one.add_checkpoint(place)
        assert len(one.checkpoints) < _MOST_CHECKPOINTS
    assert one.checkpoints[-1] is places[-1]
    assert one.checkpoint_every > 16


def test_prompts_are_read_in_turns():
    scheduler = Scheduler(8, 8)
    long, other = turn(10 * LONGEST_CHUNK), turn(2 * LONGEST_CHUNK)
    scheduler.add(long)
    scheduler.add(other)
    list(scheduler.admit())
    order = []
    for _ in range(4):
        piece = scheduler.next_chunk(False)
        order.append(piece.requests[0])
        scheduler.complete(piece)
    assert order == [long, other, long, other]


def test_short_prompts_are_read_side_by_side_and_models_apart():
    scheduler = Scheduler(8, 8)
    same, longer, foreign, shorter = turn(5), turn(9), turn(5, OTHER), turn(4)
    for one in (same, longer, foreign, shorter):
        scheduler.add(one)
    list(scheduler.admit())
    piece = scheduler.next_chunk(False)
    assert (piece.requests, piece.length) == ([same, longer], 5)
    assert scheduler.complete(piece) == [same]
    assert longer.n_left == 4


@given(st.lists(st.integers(1, 700), min_size=1, max_size=12), st.booleans(), st.integers(1, 5000))
def test_everything_is_read_once_within_the_bound(lengths, somebody_writes, microseconds):
    scheduler = Scheduler(64, 64)
    scheduler.pace.note_chunk(1, microseconds * 1e-6)
    scheduler.pace.note_step(0.03)
    turns = [turn(length) for length in lengths]
    for one in turns:
        scheduler.add(one)
    list(scheduler.admit())
    done, n_read = [], 0
    while (piece := scheduler.next_chunk(somebody_writes)) is not None:
        room = scheduler.pace.chunk_tokens(somebody_writes)
        assert 0 < len(piece.requests) * piece.length <= room
        n_read += len(piece.requests) * piece.length
        done += scheduler.complete(piece)
    assert n_read == sum(lengths)
    assert sorted(map(id, done)) == sorted(map(id, turns))
    assert scheduler.is_idle


def test_a_piece_takes_as_long_as_a_step():
    pace = _Pace()
    assert pace.chunk_tokens(True) == SHORTEST_CHUNK
    pace.note_chunk(100, 0.05)
    pace.note_step(0.03)
    assert pace.chunk_tokens(True) == 60
    assert pace.chunk_tokens(False) == LONGEST_CHUNK
    for _ in range(100):
        pace.note_step(0.0001)
    assert pace.chunk_tokens(True) == SHORTEST_CHUNK


def test_who_is_late_or_cancelled_is_taken_out():
    scheduler = Scheduler(2, 8)
    reads, late, waits = turn(5), turn(5), turn(5)
    late.deadline = 10.0
    for one in (reads, late, waits):
        scheduler.add(one)
    list(scheduler.admit())
    waits.is_cancelled = True
    assert scheduler.drop(11.0) == [(waits, False), (late, True)]
    assert scheduler.next_chunk(False).requests == [reads]
    assert scheduler.drop_all() == [(reads, True)]
