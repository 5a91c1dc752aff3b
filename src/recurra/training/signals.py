"""Stopping a run: the first SIGINT or SIGTERM asks the loop to stop, and the second one stops it at once."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopSignal:
    """A context that remembers the signal that asked the process to end.

    A training step should finish and its checkpoint be written, so the first signal is only recorded. It also restores
    the previous handlers, so that the next signal acts as it would without this class. Python allows handlers only in
    the main thread; in other threads nothing changes and `received` stays None.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)
