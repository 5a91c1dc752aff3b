"""A polite end: the first SIGINT or SIGTERM asks the loop to stop, the second one stops it where it is."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopSignal:
    """While entered, remembers the signal that asked the process to end.

    A training step is not to be torn apart, and a checkpoint is to be written after it; so the first signal
    is only noted, and the handlers of before come back with it: the next one acts as it would have without
    this class. Python allows handlers in the main thread alone; elsewhere nothing is changed and `received`
    stays None.
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
