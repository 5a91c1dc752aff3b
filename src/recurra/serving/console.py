"""A line on the terminal that shows what the server does."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from recurra.serving.service import Service

_SECONDS = 1.0


class Rate:
    """Tokens a second between two looks."""

    def __init__(self) -> None:
        self._tokens, self._at = 0, time.monotonic()

    def of(self, tokens: int, now: float) -> float:
        """Give the rate since the last look, from the total and the time."""
        rate = (tokens - self._tokens) / max(now - self._at, 1e-9)
        self._tokens, self._at = tokens, now
        return rate


def status_line(service: Service, written: float, read: float) -> str:
    """Say what the server does."""
    scheduler = service.engine.scheduler
    return (
        f"{scheduler.n_streams:,} streams  {written:,.0f} tokens/s written  {read:,.0f} read  "
        f"{scheduler.n_waiting:,} in the queue  {service.sessions.n_resident:,} sessions in memory"
    )


@contextmanager
def console_line(service: Service) -> Iterator[None]:
    """Keep the line up to date, on a terminal; elsewhere there is none."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    ended = threading.Event()

    def show() -> None:
        written, read = Rate(), Rate()
        counters = service.engine.counters
        with Live(console=console, transient=True, auto_refresh=False) as live:
            while not ended.wait(_SECONDS):
                now = time.monotonic()
                line = status_line(service, written.of(counters.written, now), read.of(counters.read, now))
                live.update(Text(line), refresh=True)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
