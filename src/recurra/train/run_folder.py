"""The folder of a run: where each file goes, and the lock of who trains it."""

import os
import shlex
from pathlib import Path
from typing import Any

from filelock import FileLock

from recurra._files.reading import read_json, read_text
from recurra._files.writing import discard, leftovers, replacing, take_lock
from recurra.checks import sentence
from recurra.registry import own_modules
from recurra.train.checkpoint import CheckpointFolder, Payload, is_checkpoint_file, load_checkpoint


class RunFolder:
    """All files of a run.

    config.yaml     the complete experiment, as a recipe
    tokenizer.json  for text: the vocabulary, so that the run can be used without its corpus
    chat_template.jinja  for text, if it is a chat model's: the template in transformers' format
    classes.txt     for videos: the names of the classes, one per line
    log.jsonl       the log, one record per line
    tensorboard/    the same records for TensorBoard
    checkpoints/    step-*.safetensors, best.safetensors; of several ranks step-*/, best-*/
    summary.json    the results, versions and hardware, written with each checkpoint and at the end
    figures/        what `recurra plot` draws
    .lock           held by the process that trains the run, whose name is in it
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.tokenizer = self.path / "tokenizer.json"
        self.chat_template = self.path / "chat_template.jinja"
        self.classes = self.path / "classes.txt"
        self.metrics = self.path / "log.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.summary = self.path / "summary.json"
        self.figures = self.path / "figures"
        self._lock = self.path / ".lock"
        self._held: FileLock | None = None
        self._identity: os.stat_result | None = None

    @property
    def quoted(self) -> str:
        """The path as a shell reads it, and --import with the user's modules, for commands that are printed."""
        return shlex.join([str(self.path), *(word for module in own_modules for word in ("--import", module))])

    def read_chat_template(self) -> str | None:
        """Read the chat template; None if there is none."""
        return read_text(self.chat_template) if self.chat_template.is_file() else None

    def require_new(self) -> None:
        """Raise FileExistsError if the folder already contains a run."""
        if self.config.exists():
            hint = f"continue it with `recurra train --resume {self.quoted}`, or choose another folder with --run-dir"
            got = f"{self.path}, which already contains a run"
            raise FileExistsError(sentence("run", got, "a folder without a run", hint))

    def require_run(self, hint: str = "") -> None:
        """Raise FileNotFoundError, with a hint, if the folder does not contain a run."""
        if not self.config.is_file():
            lacks = f"has no {self.config.name}" if self.path.exists() else "does not exist"
            got = f"{self.path}, which {lacks}"
            raise FileNotFoundError(sentence("run", got, "the folder of a run", hint))

    def lock(self) -> None:
        """Make this the only process that trains the run, and remove what killed ones left half written.

        Where the file system has no locks, every process may train it. Raises BlockingIOError if another one does.
        """
        if self._identity is not None:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self._held = take_lock(self._lock)
        except BlockingIOError as error:
            got, hint = f"{self.path}, which {error.strerror} trains", "wait until it ends, or stop it"
            raise BlockingIOError(sentence("run", got, "a run that nobody trains", hint)) from None
        self._identity = self._lock.stat()
        if self._held is None:
            return
        own = {file.name for file in (self.config, self.tokenizer, self.classes, self.metrics, self.summary)}
        for temporary, name in [*leftovers(self.path), *leftovers(self.checkpoints)]:
            if temporary.parent == self.checkpoints or name in own:
                discard(temporary)

    def unlock(self) -> None:
        """Let other processes train the run."""
        if self._held is not None:
            self._held.release()
        self._held = self._identity = None

    def require_in_place(self) -> None:
        """Raise FileNotFoundError if the folder was removed, moved or replaced since `lock`."""
        if self._identity is None:
            return
        try:
            if os.path.samestat(os.stat(self._lock), self._identity):
                return
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:
            return  # a network that does not answer just now says nothing about the folder
        got = f"{self.path}, which was removed, moved or replaced while it was trained"
        raise FileNotFoundError(sentence("run", got, "a folder that stays until its training ends"))

    def write_config(self, text: str) -> None:
        """Write config.yaml, and make the folder if it does not exist."""
        with replacing(self.config) as file:
            file.write(text.encode())

    def read_summary(self) -> dict[str, Any]:
        """Read summary.json. Raises OSError, and ValueError if it is damaged."""
        content: dict[str, Any] = read_json(self.summary, hint="remove the file; a resumed run writes it again")
        return content


def is_checkpoint(place: Path) -> bool:
    """Say whether `load_best_checkpoint` is for it: the folder of a run or a checkpoint, of one process or several."""
    return RunFolder(place).checkpoints.is_dir() or is_checkpoint_file(place)


def load_best_checkpoint(place: Path) -> tuple[Path, Payload]:
    """Read the best checkpoint of a run's folder, or the checkpoint that `place` is; return its file and contents."""
    if RunFolder(place).checkpoints.is_dir():
        file, saved = CheckpointFolder(RunFolder(place).checkpoints).load("best")
    else:
        file, saved = place, load_checkpoint(place)
    if saved["config"].get("lora", {}).get("rank"):
        hint = f"merge them: recurra convert {shlex.quote(str(place))} FOLDER --to run"
        raise ValueError(sentence(str(file), "a checkpoint of adapters alone", "one of whole weights", hint))
    return file, saved
