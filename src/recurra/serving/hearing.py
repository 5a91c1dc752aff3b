"""Between a turn's events and an answer: refusals before it begins, and an end to the turn when the client hangs up."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request, Response
from sse_starlette import EventSourceResponse
from starlette.types import Message, Send

from recurra.serving.errors import ApiError
from recurra.serving.turns import Event

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
