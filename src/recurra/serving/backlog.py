"""The events of a turn that wait for their listener: a bounded number, for a client may read slowly, or not at all."""

import asyncio
from collections.abc import AsyncIterator, Callable

from recurra.serving.turns import Event, Turn

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
