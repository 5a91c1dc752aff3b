"""The progress of a run: a bar on a terminal, plain lines elsewhere, nothing once nobody can read it."""

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from recurra.training.metrics import UNITS


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
    kind = BarProgress if console.is_terminal else PlainProgress
    return UntilHangUp(kind(total_steps, first_step, console))


class UntilHangUp:
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


class BarProgress:
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
            self.note(describe(record, self._total_steps))

    def close(self) -> None:
        """Stop the bar and leave it on the terminal."""
        self._progress.stop()


class PlainProgress:
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
        self.note(f"{describe(record, self._total_steps)}  {timedelta(seconds=left)} left")

    def close(self) -> None:
        """Do nothing: there is nothing to clean up."""


def describe(record: Mapping[str, Any], total_steps: int) -> str:
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
