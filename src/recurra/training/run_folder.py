"""The folder of a run: where each file goes, and a guard against overwriting a run."""

import json
from pathlib import Path
from typing import Any

from recurra.checks import sentence
from recurra.files.writing import leftovers, replacing
from recurra.training.run_lock import RunLock


class RunFolder:
    """All files of a run.

    config.yaml     the complete experiment, as a recipe
    tokenizer.json  for text: the vocabulary, so that the run can be used without its corpus
    classes.txt     for videos: the names of the classes, one per line
    metrics.csv     the log, one record per line
    tensorboard/    the same records for TensorBoard
    checkpoints/    step-*.pt, best.pt
    summary.json    the results, versions and hardware, written with each checkpoint and at the end
    figures/        what `recurra plot` draws
    .lock           held by the process that trains the run (see `RunLock`)
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.tokenizer = self.path / "tokenizer.json"
        self.classes = self.path / "classes.txt"
        self.metrics = self.path / "metrics.csv"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.summary = self.path / "summary.json"
        self.figures = self.path / "figures"
        self._lock = RunLock(self.path)

    def require_new(self) -> None:
        """Raise FileExistsError if the folder already contains a run."""
        if self.config.exists():
            mend = f"continue it with `recurra train --resume {self.path}`, or choose another folder with --run"
            came = f"{self.path}, which already contains a run"
            raise FileExistsError(sentence("run", came, "a folder without a run", mend))

    def require_run(self) -> None:
        """Raise FileNotFoundError if the folder does not contain a run."""
        if not self.config.is_file():
            came = f"{self.path}, which has no {self.config.name}"
            raise FileNotFoundError(sentence("run", came, "the folder of a run"))

    def lock(self) -> None:
        """Make this the only process that trains the run, and remove what killed ones left half written.

        Raises:
            BlockingIOError: another process trains it.
        """
        self._lock.acquire()
        if not self._lock.exclusive:
            return
        own = (self.config, self.tokenizer, self.classes, self.metrics, self.summary)
        for temporary, name in [*leftovers(self.path), *leftovers(self.checkpoints)]:
            if temporary.parent == self.checkpoints or name in {file.name for file in own}:
                temporary.unlink(missing_ok=True)

    def unlock(self) -> None:
        """Let other processes train the run."""
        self._lock.release()

    def require_in_place(self) -> None:
        """Raise FileNotFoundError if the folder went away since `lock`."""
        self._lock.require_in_place()

    def write_config(self, text: str) -> None:
        """Write config.yaml, and make the folder if it does not exist."""
        with replacing(self.config) as file:
            file.write(text.encode())

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json."""
        with replacing(self.summary) as file:
            file.write((json.dumps(summary, indent=2) + "\n").encode())
