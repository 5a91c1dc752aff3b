"""Clients that read slowly, and sessions that are opened together."""

import asyncio

import pytest

from recurra.serve._http import ApiError, ServeSettings
from recurra.serve._model import PausedStream
from recurra.serve._requests import EndEvent, Request, TokenDetails, TokenEvent
from recurra.serve._service import Service
from recurra.serve._streaming import EventQueue

from .conftest import asking


def _cancelled(turns):
    def cancel(turn):
        turn.is_cancelled = True
        turns.append(turn)

    return cancel


@pytest.mark.parametrize("alternatives", [0, 4])
def test_a_listener_that_is_far_behind_ends_the_turn_and_misses_nothing(exact, alternatives):
    async def listen():
        cancelled = []
        turn = Request(exact, exact.start, [1], [asking(9)], TokenDetails(True, alternatives))
        line = EventQueue(turn, _cancelled(cancelled), most=10)
        told = [TokenEvent(0, number, "a") for number in range(12)]
        line.put(told)
        assert not cancelled, "however much comes at once"
        assert await anext(line) == told
        fitting = 10 // (1 + alternatives)
        line.put(told[:fitting])
        line.put(told[fitting:])
        assert not cancelled
        line.put([EndEvent(0, "cancelled", PausedStream(None))])
        assert cancelled == [turn], "once"
        assert (await anext(line))[:-1] == told
        line.close()
        return [some async for some in line]

    assert asyncio.run(listen()) == []


def test_sessions_that_are_opened_together_keep_the_limit(models):
    """The store answers the first after all have asked."""

    async def open_many(service):
        opened = [service.sessions.open("key", models[0], f"s{number}") for number in range(9)]
        return await asyncio.gather(*opened, return_exceptions=True)

    service = Service(models, ServeSettings(max_sessions=4))
    try:
        results = asyncio.run(open_many(service))
    finally:
        service.store.close()
    refused = [result for result in results if isinstance(result, ApiError)]
    assert len(refused) == 5
    assert {error.code for error in refused} == {"too_many_sessions"}
    assert service.sessions.n_resident == 4
