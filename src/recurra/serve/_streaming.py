"""From the engine's thread to a client: a request's events in order, a bounded number of them, until it hangs up."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import fastapi
from sse_starlette import EventSourceResponse
from starlette.types import Message, Send

from recurra.serve._engine import Engine
from recurra.serve._http import ApiError
from recurra.serve._requests import EndEvent, Event, Request

_Result = TypeVar("_Result")

_MOST_WAITING = 200_000
"""Numbers that the events of a request may have while they wait. A stream that writes 1,000 tokens a second may pause
for minutes."""


class EventQueue(AsyncIterator[list[Event]]):
    """The events of a request that wait for their listener, who gets all of them at once.

    A client may read slowly, or not at all. If more than the limit waits when others come, the request is cancelled;
    nothing of what was reported until then is lost, and its end comes, too.
    """

    def __init__(self, request: Request, cancel: Callable[[Request], None], most: int = _MOST_WAITING) -> None:
        self._request, self._cancel, self._most = request, cancel, most
        self._waiting: list[Event] = []
        self._error: BaseException | None = None
        self._is_closed = False
        self._changed = asyncio.Event()

    def put(self, events: list[Event]) -> None:
        # the new ones do not count: the engine may report more at once, and nobody had the time to take them
        if len(self._waiting) * self._request.numbers_per_token > self._most and not self._request.is_cancelled:
            self._cancel(self._request)
        self._waiting += events
        self._changed.set()

    def close(self, error: BaseException | None = None) -> None:
        """End the iteration after the events that wait, with an error if there is one."""
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
        events, self._waiting = self._waiting, []
        return events


class AsyncEngine(Engine):
    """An engine whose events go to coroutines of one event loop, in one call per round."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(self._to_loop, **limits)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[Request, EventQueue] = {}

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        super().start()

    def _to_loop(self, events: dict[Request, list[Event]]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: dict[Request, list[Event]]) -> None:
        for request, some in events.items():
            if (waiting := self._queues.get(request)) is not None:
                waiting.put(some)

    async def run(self, *requests: Request) -> AsyncGenerator[list[Event], None]:
        """Submit requests and yield their events as they come, to the last; leaving the iteration cancels them."""

        def cancel_all(_: Request) -> None:
            for request in requests:
                self.cancel(request)

        events = EventQueue(requests[0], cancel_all)
        n_open = sum(request.n_sequences for request in requests)
        try:
            for request in requests:
                self._queues[request] = events
                self.submit(request)
            while n_open:
                some = await anext(events)
                n_open -= sum(isinstance(event, EndEvent) for event in some)
                yield some
        finally:
            for request in requests:
                self._queues.pop(request, None)
            if n_open:
                cancel_all(requests[0])


async def respond(
    client: fastapi.Request,
    events: AsyncGenerator[list[Event], None],
    streams: bool,
    messages: Callable[[AsyncIterator[list[Event]]], AsyncGenerator[bytes, None]],
    collect: Callable[[AsyncIterator[list[Event]]], Awaitable[dict[str, Any]]],
) -> fastapi.Response:
    """Answer a request with its events, once the first are there: a refusal comes before the answer begins.

    Args:
        streams: send server-sent events, each item of `messages` one or several of `message`; or what `collect`
            returns, in one piece: past FastAPI, which takes up to a millisecond per token.
    """
    first = await unless_gone(client, anext(events))

    async def everything() -> AsyncGenerator[list[Event], None]:
        yield first
        async for some in events:
            yield some

    async def streamed() -> AsyncGenerator[bytes, None]:
        made = messages(everything())
        try:
            async for item in made:
                yield item
        finally:
            await made.aclose()
            await events.aclose()

    if streams:
        return _EventSourceResponse(streamed())
    try:
        body = await unless_gone(client, collect(everything()))
    finally:
        await events.aclose()
    text = await asyncio.to_thread(json.dumps, body)
    return fastapi.Response(text.encode(), media_type="application/json")


class _EventSourceResponse(EventSourceResponse):
    """Sends without a time limit: entering and leaving one costs as much as sending."""

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        await send(message)


def message(data: str, event: str = "") -> bytes:
    kind = f"event: {event}\r\n" if event else ""
    return f"{kind}data: {data}\r\n\r\n".encode()


async def unless_gone(client: fastapi.Request, work: Awaitable[_Result]) -> _Result:
    """Wait for `work`, but cancel it when the client hangs up."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hung_up(client))
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


async def _hung_up(client: fastapi.Request) -> None:
    while (await client.receive())["type"] != "http.disconnect":
        pass
