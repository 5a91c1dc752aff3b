"""A turn as the HTTP side sees it: its events, in order, as an asynchronous iterator."""

import asyncio
from collections.abc import AsyncGenerator

from recurra.serving.backlog import Backlog
from recurra.serving.engine import Engine
from recurra.serving.turns import EndEvent, Event, Turn


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
