"""What a run reports: sums over several steps, and records as JSON lines, in TensorBoard and on a console."""

import errno
import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from recurra._files.reading import parse_json, read_text
from recurra._files.writing import naming, replacing
from recurra.checks import require, sentence
from recurra.train._ranks import Ranks

_Record = Mapping[str, Any]

Unit: TypeAlias = Literal["tokens", "frames"]
"""The unit of the data: what its steps are, and how speed is counted."""

_MEASURED = ("epoch", "train_loss", "valid_loss", "valid_accuracy", "learning_rate", "gradient_norm", "seconds")
_COLUMNS = ("step", "tokens", "frames", "level", *_MEASURED, "tokens_per_second", "frames_per_second")
"""Losses are in nats per counted target. Tokens or frames, and seconds, count from the start of the run and exclude
evaluation. The level is that of data that wait until one is learned."""

_MEND = "remove the file, and a resumed run logs from its checkpoint on"


class RunningSums:
    """The sums since the last record. The loss stays on the device, in float64, until it is read."""

    def __init__(self, device: torch.device | str) -> None:
        self.loss: Tensor = torch.zeros((), dtype=torch.float64, device=device)
        self.n_targets = 0
        self.n_tokens = 0
        self.seconds = 0.0

    def add(self, loss: Tensor, n_targets: int, n_tokens: int) -> None:
        """Add a batch: its summed loss, the number of its targets that count, and its tokens or frames."""
        self.loss += loss.detach()
        self.n_targets += n_targets
        self.n_tokens += n_tokens

    def mean_loss(self) -> float:
        """Compute the loss in nats per target; NaN if no target counted."""
        return float(self.loss) / self.n_targets if self.n_targets else math.nan

    def add_up(self, ranks: Ranks) -> None:
        """Make these the sums over all ranks, on all of them."""
        if ranks.several:
            self.load_state_dict(self.state_dict(ranks))

    def state_dict(self, ranks: Ranks) -> dict[str, int | float]:
        """Return the sums, over all ranks, as numbers."""
        loss, n_targets, n_tokens = ranks.total(float(self.loss), self.n_targets, self.n_tokens)
        return {"loss": loss, "n_targets": int(n_targets), "n_tokens": int(n_tokens), "seconds": self.seconds}

    def load_state_dict(self, saved: Mapping[str, Any], *, share: int = 1) -> None:
        """Continue from the sums of `state_dict`; with a share of 0 another rank keeps them."""
        self.loss.fill_(share * saved["loss"])
        self.n_targets, self.n_tokens = share * saved["n_targets"], share * saved["n_tokens"]
        self.seconds = saved["seconds"]


class JsonLog:
    """Records as lines of JSON, each flushed as soon as it is written.

    Records after `last_step`, and any unfinished line, are dropped: a run that resumes here writes them again.
    """

    def __init__(self, path: Path, *, last_step: int = 0) -> None:
        records = read_metrics(path) if path.is_file() else []
        self._path = path
        with replacing(path) as file:
            file.write("".join(_line(record) for record in records if record["step"] <= last_step).encode())
        self._file = path.open("a", encoding="utf-8", newline="")

    def write(self, record: _Record) -> None:
        """Add a record. Raises ValueError for a key that is not in `COLUMNS`, and OSError."""
        line = _line(record)
        with naming(self._path):
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        """Close the file. Raises OSError."""
        with naming(self._path):
            self._file.close()


def _line(record: _Record) -> str:
    unknown = ", ".join(sorted(record.keys() - set(_COLUMNS)))
    require(not unknown, "record", unknown, f"keys among {', '.join(_COLUMNS)}")
    return json.dumps({name: value for name, value in record.items() if value is not None}) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the records of a log, without a last line that a killed process left unfinished.

    Returns:
        for each record the values of all `COLUMNS`; None where nothing was measured.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no log.
    """
    records = []
    for number, line in enumerate(read_text(path, hint=_MEND).split("\n")[:-1], 1):
        where = f"{path}:{number}"
        record = parse_json(line, where, hint=_MEND)
        if "step" not in record or not record.keys() <= set(_COLUMNS):
            expected = f"step, and keys among {', '.join(_COLUMNS)}"
            raise ValueError(sentence(where, f"a record of {', '.join(record) or 'nothing'}", expected, _MEND))
        records.append(dict.fromkeys(_COLUMNS) | record)
    return records


class TensorBoardLog:
    """Records as TensorBoard scalars, each flushed as soon as it is written, in an event file of their own.

    TensorBoard forgets what an earlier process wrote after `last_step`. torch's SummaryWriter would write in a thread
    of its own, where a full disk ends in a traceback.
    """

    def __init__(self, folder: Path, *, last_step: int = 0) -> None:
        # Slow to import, and not every run needs it.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files in the order of their names, and the clock may have been set back.
        before = (path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*.*"))
        number = max([time.time_ns(), *(int(word) + 1 for word in before if word.isdecimal())])
        self._path = folder / f"events.out.tfevents.{number}.{socket.gethostname()}.{os.getpid()}"
        self._file = RecordWriter(self._path.open("xb"))
        self._write(Event(file_version="brain.Event:2"))
        self._write(Event(step=last_step + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, record: _Record) -> None:
        """Add a scalar for each number of the record. Raises OSError."""
        numbers = {name: float(value) for name, value in record.items() if name != "step"}
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._write(self._event(step=record["step"], summary=self._summary(value=values)))

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        with naming(self._path):
            self._file.write(event.SerializeToString())
            self._file.flush()

    def close(self) -> None:
        """Close the file. Raises OSError."""
        with naming(self._path):
            self._file.close()


class RunProgress:
    """Lines on a console, with a bar on a terminal; once nobody can read it, the run continues without."""

    def __init__(self, total_steps: int, first_step: int, console: Console) -> None:
        self._total_steps, self._console = total_steps, console
        self._bar: Progress | None = None
        self._last = (0, 0.0)  # the step and the seconds of the last record
        if console.is_terminal:
            left = TextColumn("loss {task.fields[loss]}"), TextColumn("{task.fields[speed]}"), TimeRemainingColumn()
            epoch = TextColumn("epoch {task.fields[epoch]}")
            self._bar = Progress(epoch, BarColumn(), MofNCompleteColumn(), *left, console=console)
            fields: dict[str, Any] = {"epoch": "-", "loss": "-", "speed": "-"}
            self._task = self._bar.add_task("train", total=total_steps, completed=first_step, **fields)
            self._bar.start()

    def note(self, text: str) -> None:
        """Print a line, above the bar."""
        with _unless_hung_up():
            self._console.print(text, markup=False, highlight=False, soft_wrap=self._bar is None)

    def advance(self, step: int) -> None:
        """Report that a step is done."""
        if self._bar is not None:
            with _unless_hung_up():
                self._bar.update(self._task, completed=step)

    def report(self, record: _Record) -> None:
        """Report a record of the log: on a terminal as a part of the bar, and as a line if it is an evaluation."""
        line = _describe(record, self._total_steps)
        if self._bar is None:
            self.note(f"{line}  {timedelta(seconds=self._left(record))} left")
            return
        fields = {"epoch": record["epoch"]}
        if "train_loss" in record:
            fields |= {"loss": f"{record['train_loss']:.4f}", "speed": ", ".join(_speeds(record))}
        with _unless_hung_up():
            self._bar.update(self._task, **fields)
        if "valid_loss" in record:
            self.note(line)

    def _left(self, record: _Record) -> int:
        """Seconds to the end at the speed since the last record: earlier ones, or another machine's, may differ."""
        (step, seconds), self._last = self._last, (record["step"], record["seconds"])
        if record["step"] == step:
            step, seconds = 0, 0.0
        return round((self._total_steps - record["step"]) * (record["seconds"] - seconds) / (record["step"] - step))

    def close(self) -> None:
        """Stop the bar and leave it on the terminal."""
        if self._bar is not None:
            with _unless_hung_up():
                self._bar.stop()


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


def _describe(record: _Record, total_steps: int) -> str:
    parts = [f"epoch {record['epoch']}  step {record['step']}/{total_steps}"]
    if "train_loss" in record:
        parts += [f"loss {record['train_loss']:.4f}", *_speeds(record)]
    if "level" in record:
        parts.append(f"level {record['level']}")
    for name, form in (("valid_loss", "validation: loss {:.4f}"), ("valid_accuracy", "accuracy {:.4f}")):
        if name in record:
            parts.append(form.format(record[name]))
    return "  ".join(parts)


def _speeds(record: _Record) -> list[str]:
    """Write the speed of a record, if it has one, in the unit of the data."""
    named = {unit: f"{unit}_per_second" for unit in ("tokens", "frames")}
    return [f"{record[name]:,.0f} {unit}/s" for unit, name in named.items() if name in record]
