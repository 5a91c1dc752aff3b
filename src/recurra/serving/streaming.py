"""From the engine's thread to the client: events in order, a bounded number of them, until somebody hangs up."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request, Response
from sse_starlette import EventSourceResponse
from starlette.types import Message, Send

from recurra.serving.engine import Engine
from recurra.serving.http import ApiError
from recurra.serving.requests import EndEvent, Event, Turn

MOST_WAITING = 200_000
"""Numbers that the events of a turn may have while they wait. A stream that writes 1,000 tokens a second may pause for
minutes."""


class Backlog(AsyncIterator[list[Event]]):
    """Passes on the events of a turn, in their order, and all that wait at once.

    If more than the limit waits when others come, the turn is cancelled: nothing is lost of what it has told until
    then, and its end comes, too.

    Args:
        turn: whose events they are.
        cancel: ends the turn early.
        most: numbers that may wait.
    """

    def __init__(self, turn: Turn, cancel: Callable[[Turn], None], most: int = MOST_WAITING) -> None:
        self._turn, self._cancel, self._most = turn, cancel, most
        self._waiting: list[Event] = []
        self._error: BaseException | None = None
        self._is_closed = False
        self._changed = asyncio.Event()

    def put(self, events: list[Event]) -> None:
        """Add events."""
        # not those that come: what the engine tells at once may be more, and nobody had the time to take it
        if len(self._waiting) * self._turn.numbers_each > self._most and not self._turn.is_cancelled:
            self._cancel(self._turn)
        self._waiting += events
        self._changed.set()

    def close(self, error: BaseException | None = None) -> None:
        """End the iteration after what waits, with an error if there is one."""
        self._is_closed, self._error = True, error
        self._changed.set()

    async def __anext__(self) -> list[Event]:
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self._is_closed:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        some, self._waiting = self._waiting, []
        return some


class LiveTurns:
    """Carries events from the engine's thread to those who wait for them in an event loop; one call a round.

    Made before the engine; `attach` it to the loop afterwards.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lines: dict[Turn, Backlog] = {}

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say which loop waits."""
        self._loop = loop

    def deliver(self, events: dict[Turn, list[Event]]) -> None:
        """Hand events over; called on the engine's thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: dict[Turn, list[Event]]) -> None:
        for turn, some in events.items():
            if (line := self._lines.get(turn)) is not None:
                line.put(some)

    async def run(self, engine: Engine, turn: Turn) -> AsyncGenerator[list[Event], None]:
        """Submit a turn and give its events as they come, to the last.

        A caller that goes away, or is far behind, cancels it.

        Raises:
            QueueFull: too many wait.
        """
        line = self._lines[turn] = Backlog(turn, engine.cancel)
        n_open = max(1, len(turn.configs))
        try:
            engine.submit(turn)
            while n_open:
                some = await anext(line)
                n_open -= sum(isinstance(event, EndEvent) for event in some)
                yield some
        finally:
            del self._lines[turn]
            if n_open:
                engine.cancel(turn)


Result = TypeVar("Result")


class Heard(AsyncIterator[list[Event]]):
    """The events of a turn, of which the first have come. `begun` makes it."""

    def __init__(self, first: list[Event], rest: AsyncGenerator[list[Event], None]) -> None:
        self._first: list[Event] | None = first
        self._rest = rest

    async def __anext__(self) -> list[Event]:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return await anext(self._rest)

    async def close(self) -> None:
        """Say that nobody listens any more: a turn that is not over is cancelled."""
        await self._rest.aclose()


async def begun(request: Request, events: AsyncGenerator[list[Event], None]) -> Heard:
    """Wait for the first events, so that a refusal comes before the answer begins.

    Raises:
        ApiError, QueueFull: the turn was refused, or the client has hung up.
    """
    return Heard(await unless_gone(request, anext(events)), events)


def message(data: str, event: str = "") -> bytes:
    """An event of a stream as it goes out; `data` is one line."""
    kind = f"event: {event}\r\n" if event else ""
    return f"{kind}data: {data}\r\n\r\n".encode()


class _EventStream(EventSourceResponse):
    """A stream that sends without a time limit: entering and leaving one costs as much as sending."""

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        await send(message)


def event_stream(heard: Heard, items: AsyncGenerator[bytes, None]) -> EventSourceResponse:
    """Answer with a stream of `items`, each one or several of `message`, made of the events."""

    async def closing() -> AsyncGenerator[bytes, None]:
        try:
            async for item in items:
                yield item
        finally:
            await items.aclose()
            await heard.close()

    return _EventStream(closing())


async def whole(request: Request, heard: Heard, answer: Awaitable[dict[str, Any]]) -> Response:
    """Wait for an answer that goes out as one. Raises what it raises, or ApiError if the client hangs up.

    It is plain data. FastAPI would walk through it on the event loop, which takes up to a millisecond for each token.
    """
    try:
        body = await unless_gone(request, answer)
    finally:
        await heard.close()
    text = await asyncio.to_thread(json.dumps, body)
    return Response(text.encode(), media_type="application/json")


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """Wait for `work`, but end it when the client hangs up. Raises ApiError then."""
    task = asyncio.ensure_future(_awaited(work))
    gone = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(499, "the client hung up")
    finally:
        for one in (task, gone):
            one.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await one


async def _awaited(work: Awaitable[Result]) -> Result:
    return await work


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
