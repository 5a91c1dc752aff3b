"""Stopping a run: the first SIGINT, SIGTERM or SIGHUP asks the loop to stop, a second SIGINT or SIGTERM ends it."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopSignal:
    """A context that remembers the signal that asked the process to end.

    A training step should finish and its checkpoint be written, so the first signal is only recorded. It also restores
    the previous handlers of SIGINT and SIGTERM, so that the next of these acts as it would without this class. Not that
    of SIGHUP: when a terminal closes, both its shell and the kernel send one. An ignored SIGHUP, as under nohup, stays
    ignored. Python allows handlers only in the main thread; in other threads nothing changes and `received` stays None.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)
    HANG_UP: signal.Signals | None = getattr(signal, "SIGHUP", None)  # Windows has none

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            numbers = list(self.SIGNALS)
            if self.HANG_UP is not None and signal.getsignal(self.HANG_UP) is not signal.SIG_IGN:
                numbers.append(self.HANG_UP)
            self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore(*self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        self._restore(*self.SIGNALS)

    def _restore(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            if number in self._before:
                signal.signal(number, self._before.pop(number))
