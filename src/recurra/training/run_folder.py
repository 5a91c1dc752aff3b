"""The folder of a run: where each file goes, and a guard against overwriting a run."""

from pathlib import Path
from typing import Any

from recurra.checks import sentence
from recurra.files.stamped_json import read_stamped, write_stamped
from recurra.files.typed import require_fields
from recurra.files.writing import discard, leftovers, replacing
from recurra.training.checkpoint import REST, CheckpointFolder, Payload, load_checkpoint
from recurra.training.run_lock import RunLock

_SUMMARY_AGAIN = "remove the file; a resumed run writes it again"
_SUMMARY_TYPES = {
    "finished": bool,
    "steps": int,
    "epochs": float,
    "parameters": int,
    "tokens": int,
    "frames": int,
    "seconds": float,
    "tokens_per_second": float | None,
    "frames_per_second": float | None,
    "ranks": int,
    "resumed_at": list[int],
    "validation": dict[str, dict[str, float]],
    "versions": dict[str, str],
    "hardware": dict[str, Any] | None,
}


class RunFolder:
    """All files of a run.

    config.yaml     the complete experiment, as a recipe
    tokenizer.json  for text: the vocabulary, so that the run can be used without its corpus
    classes.txt     for videos: the names of the classes, one per line
    metrics.csv     the log, one record per line
    tensorboard/    the same records for TensorBoard
    checkpoints/    step-*.pt, best.pt; of several ranks step-*/, best-*/
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
                discard(temporary)

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
        write_stamped(self.summary, summary)

    def read_summary(self) -> dict[str, Any]:
        """Read summary.json.

        Raises:
            OSError: it cannot be read.
            ValueError: it is damaged.
        """
        content = read_stamped(self.summary, allow_nan=True, mend=_SUMMARY_AGAIN)
        require_fields(content, _SUMMARY_TYPES, str(self.summary), finite=False)
        return content


def is_checkpoint(place: Path) -> bool:
    """Say whether `load_best_checkpoint` is for it: the folder of a run or a checkpoint, of one process or several."""
    return RunFolder(place).checkpoints.is_dir() or place.suffix == ".pt" or (place / REST).is_file()


def load_best_checkpoint(place: Path) -> tuple[Path, Payload]:
    """Read the best checkpoint of a run's folder, or the checkpoint that `place` is; return its file and contents.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    if RunFolder(place).checkpoints.is_dir():
        return CheckpointFolder(RunFolder(place).checkpoints).load("best")
    return place, load_checkpoint(place)
