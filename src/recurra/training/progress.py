"""How far a run is, for whoever watches: a bar on a terminal, plain lines anywhere else."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from recurra.training.metrics import UNITS


@runtime_checkable
class RunProgress(Protocol):
    """What the training loop tells."""

    def note(self, text: str) -> None:
        """Say something in a line of its own."""
        ...

    def advance(self, step: int) -> None:
        """A step was made."""
        ...

    def report(self, row: Mapping[str, Any]) -> None:
        """A row of the log was written."""
        ...

    def close(self) -> None:
        """The run has ended."""
        ...


def watch(total_steps: int, first_step: int, console: Console) -> RunProgress:
    """The progress that suits the console: `BarProgress` on a terminal, else `PlainProgress`."""
    kind = BarProgress if console.is_terminal else PlainProgress
    return kind(total_steps, first_step, console)


class BarProgress:
    """One line that moves: epoch, steps, loss, tokens/s, time left; evaluations stay as lines above it."""

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

    def report(self, row: Mapping[str, Any]) -> None:
        """Show the newest loss and speed; print a line for an evaluation."""
        self._progress.update(self._task, epoch=row["epoch"])
        if "train_loss" in row:
            self._progress.update(
                self._task,
                loss=f"{row['train_loss']:.4f}",
                speed=", ".join(_speeds(row)),
            )
        if "valid_loss" in row:
            self.note(describe(row, self._total_steps))

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._progress.stop()


class PlainProgress:
    """One line a report, with the time left: for log files and pipes."""

    def __init__(self, total_steps: int, first_step: int, console: Console) -> None:
        self._total_steps, self._console = total_steps, console

    def note(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def advance(self, step: int) -> None:
        """Nothing: the reports say where the run is."""

    def report(self, row: Mapping[str, Any]) -> None:
        """Print the row, and how long the rest takes at the mean speed so far."""
        left = round((self._total_steps - row["step"]) * row["seconds"] / row["step"])
        self.note(f"{describe(row, self._total_steps)}  {timedelta(seconds=left)} left")

    def close(self) -> None:
        """Nothing to put away."""


def describe(row: Mapping[str, Any], total_steps: int) -> str:
    """A row of the log in one line."""
    parts = [f"epoch {row['epoch']}  step {row['step']}/{total_steps}"]
    if "train_loss" in row:
        parts += [f"loss {row['train_loss']:.4f}", *_speeds(row)]
    for name, form in (("valid_loss", "validation: loss {:.4f}"), ("valid_accuracy", "accuracy {:.4f}")):
        if name in row:
            parts.append(form.format(row[name]))
    return "  ".join(parts)


def _speeds(row: Mapping[str, Any]) -> list[str]:
    """The speed, in the unit of the data, where the row has it."""
    named = {unit: f"{unit}_per_second" for unit in UNITS}
    return [f"{row[name]:,.0f} {unit}/s" for unit, name in named.items() if name in row]
