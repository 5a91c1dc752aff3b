"""What a run reports: sums over a window of steps, rows of a CSV file, TensorBoard events."""

import csv
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from recurra.data.files import replacing

Row = Mapping[str, Any]

Unit: TypeAlias = Literal["tokens", "frames"]
UNITS: tuple[Unit, ...] = ("tokens", "frames")
"""What a step of the input is, and what speed is counted in."""

COLUMNS = (
    "step",
    "epoch",
    "train_loss",
    "valid_loss",
    "valid_accuracy",
    "learning_rate",
    "gradient_norm",
    "tokens",
    "tokens_per_second",
    "frames",
    "frames_per_second",
    "seconds",
)
"""Losses in nats per counted target; tokens or frames, and seconds, since the run began, evaluation left out; an
empty cell was not measured."""


class Window:
    """The sums since the last row of the log. The loss stays on the device, in float64, until it is asked
    for."""

    def __init__(self, device: torch.device | str) -> None:
        self.loss: Tensor = torch.zeros((), dtype=torch.float64, device=device)
        self.n_targets = 0
        self.n_tokens = 0
        self.seconds = 0.0

    def add(self, loss: Tensor, n_targets: int, n_tokens: int) -> None:
        """Add a batch: its summed loss, its targets that count, its input tokens or frames."""
        self.loss += loss.detach()
        self.n_targets += n_targets
        self.n_tokens += n_tokens

    def mean_loss(self) -> float:
        """Nats per target; NaN where none counted."""
        return float(self.loss) / self.n_targets if self.n_targets else math.nan

    def state_dict(self) -> dict[str, int | float]:
        """The sums as numbers."""
        numbers = {name: value for name, value in vars(self).items() if name != "loss"}
        return {"loss": float(self.loss), **numbers}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from the sums of `state_dict`."""
        self.loss.fill_(saved["loss"])
        self.n_targets, self.n_tokens, self.seconds = (saved[k] for k in ("n_targets", "n_tokens", "seconds"))


@runtime_checkable
class MetricLog(Protocol):
    """Where rows go."""

    def write(self, row: Row) -> None:
        """Add a row; it holds `step` and whatever was measured."""
        ...

    def close(self) -> None:
        """Finish writing."""
        ...


class CsvLog:
    """Rows in a CSV file, each on the disk's side of the process as soon as it is written.

    Numbers are written in full, so that the file holds what was measured to the last bit.

    Args:
        path: the file; it is made where it is missing.
        last_step: rows of later steps are dropped, and with them a line that a killed process left
            unfinished. A run that resumes at that step writes them again, and the file has neither a seam
            nor a duplicate.
    """

    def __init__(self, path: Path, *, last_step: int = 0) -> None:
        kept = [row for row in read_metrics(path) if int(row["step"]) <= last_step] if path.is_file() else []
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
        with replacing(path) as file:
            file.write(text.getvalue().encode())
        self._file = path.open("a", encoding="utf-8", newline="")
        self._writer = csv.DictWriter(self._file, COLUMNS, lineterminator="\n")

    def write(self, row: Row) -> None:
        """Add a row. Raises ValueError for a column that is not in `COLUMNS`."""
        self._writer.writerow(row)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, str]]:
    """The whole rows of a metrics file; a line without its end, which a killed process left, is passed
    over."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = [line for line in file if line.endswith("\n")]
    return list(csv.DictReader(lines))


class TensorBoardLog:
    """The same rows as TensorBoard scalars.

    Args:
        folder: where the event files go.
        last_step: TensorBoard is told to forget what an earlier process wrote after this step.
    """

    def __init__(self, folder: Path, *, last_step: int = 0) -> None:
        # Slow to import, and not wanted by every run.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=last_step + 1)

    def write(self, row: Row) -> None:
        """Add a scalar for each number of the row."""
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Write what is still in memory and close the file."""
        self._writer.close()
