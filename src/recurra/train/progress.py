"""Stopping a run: the first SIGINT, SIGTERM or SIGHUP asks the loop to stop, a second SIGINT or SIGTERM ends it."""

import errno
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from recurra.train.metrics import UNITS


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


# --- the progress of a run: a bar on a terminal, plain lines elsewhere, nothing once nobody can read it ---


@runtime_checkable
class RunProgress(Protocol):
    """What the training loop reports."""

    def note(self, text: str) -> None:
        """Show a line of text."""
        ...

    def advance(self, step: int) -> None:
        """Report that a step is done."""
        ...

    def report(self, record: Mapping[str, Any]) -> None:
        """Report a record of the log."""
        ...

    def close(self) -> None:
        """End the report."""
        ...


def watch(total_steps: int, first_step: int, console: Console) -> RunProgress:
    """Choose the progress for a console: `BarProgress` on a terminal, `PlainProgress` elsewhere, `UntilHangUp`."""
    kind = _BarProgress if console.is_terminal else _PlainProgress
    return _UntilHangUp(kind(total_steps, first_step, console))


class _UntilHangUp:
    """Shows a progress for as long as its terminal, or the reader of its pipe, is there: the run goes on without it."""

    def __init__(self, shown: RunProgress) -> None:
        self.shown = shown

    def note(self, text: str) -> None:
        """Show a line of text."""
        with _unless_hung_up():
            self.shown.note(text)

    def advance(self, step: int) -> None:
        """Report that a step is done."""
        with _unless_hung_up():
            self.shown.advance(step)

    def report(self, record: Mapping[str, Any]) -> None:
        """Report a record of the log."""
        with _unless_hung_up():
            self.shown.report(record)

    def close(self) -> None:
        """End the report."""
        with _unless_hung_up():
            self.shown.close()


@contextmanager
def _unless_hung_up() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EPIPE):  # what writing to a closed terminal or pipe gives
            raise
    except SystemExit as ended:  # how rich answers a closed pipe, after it has silenced itself and standard output
        if not isinstance(ended.__context__, BrokenPipeError):
            raise


class _BarProgress:
    """A bar with epoch, steps, loss, tokens/s and time left; evaluations stay as lines above it."""

    def __init__(self, total_steps: int, first_step: int, console: Console) -> None:
        self._total_steps = total_steps
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task(
            "train", total=total_steps, completed=first_step, epoch="-", loss="-", speed="-"
        )
        self._progress.start()

    def note(self, text: str) -> None:
        """Print above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=step)

    def report(self, record: Mapping[str, Any]) -> None:
        """Show the newest loss and speed, and print a line for an evaluation."""
        self._progress.update(self._task, epoch=record["epoch"])
        if "train_loss" in record:
            self._progress.update(
                self._task,
                loss=f"{record['train_loss']:.4f}",
                speed=", ".join(_speeds(record)),
            )
        if "valid_loss" in record:
            self.note(_describe(record, self._total_steps))

    def close(self) -> None:
        """Stop the bar and leave it on the terminal."""
        self._progress.stop()


class _PlainProgress:
    """A line per record, with the time left: for log files and pipes."""

    def __init__(self, total_steps: int, first_step: int, console: Console) -> None:
        self._total_steps, self._console = total_steps, console

    def note(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def advance(self, step: int) -> None:
        """Do nothing: the records say how far the run is."""

    def report(self, record: Mapping[str, Any]) -> None:
        """Print the record, and the time that the rest takes at the mean speed so far."""
        left = round((self._total_steps - record["step"]) * record["seconds"] / record["step"])
        self.note(f"{_describe(record, self._total_steps)}  {timedelta(seconds=left)} left")

    def close(self) -> None:
        """Do nothing: there is nothing to clean up."""


def _describe(record: Mapping[str, Any], total_steps: int) -> str:
    """Write a record of the log as one line."""
    parts = [f"epoch {record['epoch']}  step {record['step']}/{total_steps}"]
    if "train_loss" in record:
        parts += [f"loss {record['train_loss']:.4f}", *_speeds(record)]
    if "level" in record:
        parts.append(f"level {record['level']}")
    for name, form in (("valid_loss", "validation: loss {:.4f}"), ("valid_accuracy", "accuracy {:.4f}")):
        if name in record:
            parts.append(form.format(record[name]))
    return "  ".join(parts)


def _speeds(record: Mapping[str, Any]) -> list[str]:
    """Write the speed of a record, if it has one, in the unit of the data."""
    named = {unit: f"{unit}_per_second" for unit in UNITS}
    return [f"{record[name]:,.0f} {unit}/s" for unit, name in named.items() if name in record]
