"""A key with one stream beside a key with hundreds: counted in rounds, chunks and places, not in seconds."""

import contextlib

import pytest

from recurra.serve._http import ServeSettings
from recurra.serve._model import PausedStream
from recurra.serve._requests import LONGEST_CHUNK, Request
from recurra.serve._scheduler import QueueFull, Scheduler

from .conftest import Rounds, asking

MODEL = object()
BUSY, LONE = "busy-key-0123", "lone-key-0123"


def asked(owner: str, n_tokens: int = 0, n_sequences: int = 1) -> Request:
    """A request that reads `n_tokens` before its last one."""
    return Request(MODEL, PausedStream(None), [0] * (n_tokens + 1), [None] * n_sequences, owner=owner)


@pytest.mark.parametrize("n_busy", [256, 250], ids=["full batches", "a batch with room"])
def test_a_lone_stream_takes_every_other_step(exact, n_busy):
    """Four batches of the other key take turns; it does not wait for all of them."""
    rounds = Rounds()
    busy = [
        Request(exact, exact.start, [1, 2], [asking(100)] * min(64, n_busy - n), owner=BUSY)
        for n in range(0, n_busy, 64)
    ]
    rounds.run(*busy, rounds=6)
    lone = Request(exact, exact.start, [1, 2], [asking(100)], owner=LONE)
    before = [len(rounds.tokens(one)) for one in busy]
    rounds.run(lone, rounds=12)
    assert len(rounds.written(lone)) == 6
    assert all(len(rounds.tokens(one)) > n for one, n in zip(busy, before))  # and they all go on


def test_prompts_of_two_keys_are_read_in_turns():
    scheduler = Scheduler(64, 64)
    many = [asked(BUSY, 10 * LONGEST_CHUNK) for _ in range(20)]
    lone = asked(LONE, 3 * LONGEST_CHUNK)
    for one in (*many, lone):
        scheduler.add(one)
    list(scheduler.admit())
    order = []
    for _ in range(8):
        chunk = scheduler.next_chunk(False)
        order += chunk.requests
        scheduler.complete(chunk)
    assert order == [many[0], lone, many[1], lone, many[2], lone, many[3], many[4]]


def test_the_next_place_is_the_key_s_with_the_fewest():
    scheduler = Scheduler(4, 64)
    many, lone = [asked(BUSY) for _ in range(20)], [asked(LONE) for _ in range(3)]
    for one in (*many, *lone):
        scheduler.add(one)
    assert list(scheduler.admit()) == [many[0], lone[0], many[1], lone[1]]
    scheduler.release(BUSY, 1)
    assert list(scheduler.admit()) == [many[2]]
    scheduler.release(LONE, 2)
    assert list(scheduler.admit()) == [lone[2], many[3]]
    assert (scheduler.n_streams, scheduler.n_waiting) == (4, 16)


def test_a_key_leaves_places_and_a_part_of_the_queue_to_others():
    scheduler = Scheduler(16, 8, share_of=ServeSettings(api_keys=(BUSY, LONE)).share_of)
    for _ in range(14):
        scheduler.add(asked(BUSY))
    assert len(list(scheduler.admit())) == 14
    for _ in range(7):
        scheduler.add(asked(BUSY))
    assert not list(scheduler.admit())
    with pytest.raises(QueueFull):
        scheduler.add(asked(BUSY))
    lone = asked(LONE)
    scheduler.add(lone)
    assert list(scheduler.admit()) == [lone]
    scheduler.release(BUSY, 1)
    assert len(list(scheduler.admit())) == 1  # of its own queue


@pytest.mark.parametrize("limits", [{"max_streams": 2, "max_queue": 0}, {"max_connections": 16}])
def test_a_key_that_fills_the_server_is_refused_and_another_is_answered(serving, limits):
    running = serving(api_keys=(BUSY, LONE), **limits)
    busy, lone = (running.client(authorization=f"Bearer {key}") for key in (BUSY, LONE))
    long = {"model": "letters", "prompt": "a", "max_tokens": 60_000, "stream": True}
    with contextlib.ExitStack() as open_streams:
        status = 200
        for _ in range(20):
            if status == 200:
                status = open_streams.enter_context(busy.stream("POST", "/v1/completions", json=long)).status_code
        assert status in (429, 503)
        answer = lone.post("/v1/completions", json={"model": "letters", "prompt": "a", "max_tokens": 2})
        assert answer.status_code == 200


@pytest.mark.parametrize("n_sequences", [1, 4])
def test_texts_that_wait_for_their_prompt_do_not_count_as_generating(n_sequences):
    """A chunk for many waiting prompts is as long as if each asked for one text."""
    scheduler = Scheduler(64, 64)
    for one in (asked(BUSY, 1000, n_sequences) for _ in range(6)):
        scheduler.add(one)
    list(scheduler.admit())
    assert scheduler._share(6) == 8 * 5
