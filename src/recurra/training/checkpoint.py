"""Checkpoints: written whole or not at all, and refused if they have changed since or are not what they should be.

A checkpoint is an ordinary `torch.save` file of plain data (tensors, numbers, strings, lists, dicts), read with
`weights_only=True`, so that opening one runs no code. The format is a zip archive. Its directory is at the end, so a
truncated file does not open; each entry has a checksum, and a digest of all entries is the archive's comment. What is
read is then compared with the keys and types that a checkpoint has (`payload.py`).
"""

import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor, nn

from recurra import __version__
from recurra.checks import sentence
from recurra.files.archives import SEAL_BYTES, ArchiveError, load_archive, seal_archive
from recurra.files.weights import shape_difference
from recurra.files.writing import NO_ROOM, discard, free_bytes, replacing
from recurra.training.payload import require_payload, require_plain

if TYPE_CHECKING:
    from recurra.training.sharded_checkpoint import Target

FORMAT = "recurra-checkpoint"
FORMAT_VERSION = 2
_CHECKPOINT = "a checkpoint of recurra train"
REST = "rest.pt"
"""What several ranks write besides their tensors into a checkpoint, which is a folder."""
_BEST = r"best(\.pt|-\d{10,})"

Payload = dict[str, Any]


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and says what to do."""


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    return {
        "recurra": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def with_stamp(payload: Payload) -> Payload:
    """Add the format and the versions."""
    return {"format": FORMAT, "format_version": FORMAT_VERSION, "versions": versions(), **payload}


def save_checkpoint(path: Path, payload: Payload) -> None:
    """Write `payload` atomically, stamped with the format and the versions.

    Raises:
        OSError: the file cannot be written. The message says why and, if it is for lack of room, how much is needed.
        ValueError: `payload` has something else than tensors, numbers, strings and None, in lists and dicts.
    """
    stamped = with_stamp(payload)
    require_plain(stamped, path)
    needed = 0
    try:
        with replacing(path) as file:
            out = _UntilError(file)
            torch.save(stamped, out)  # type: ignore[arg-type]
            needed = out.n_bytes + SEAL_BYTES
            if out.error is not None:
                raise out.error
            seal_archive(file, Path(file.name))
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in NO_ROOM:
            reason += f"; it needs {needed:,} bytes, and {free_bytes(path.parent):,} are free"
        came = f"a checkpoint that cannot be written ({reason})"
        raise OSError(sentence(str(path), came, "a file that can be written")) from error


class _UntilError:
    """Writes to a file up to its first error, which it keeps; what follows is only counted.

    PyTorch's writer of zip files does not survive an error: it raises another one while it is closed, about positions.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.n_bytes = 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        self.n_bytes += len(data)
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return len(data)

    def flush(self) -> None:
        """Do nothing: the file is flushed when it is closed."""


def load_checkpoint(path: Path, device: torch.device | str = "cpu", *, target: "Target | None" = None) -> Payload:
    """Check every byte of a checkpoint, and read it.

    Args:
        path: a file, or the folder that several ranks wrote.
        device: where the tensors of a file go.
        target: what the tensors of a folder are read into; None reads all of them, to the CPU.

    Raises:
        CheckpointError: the file does not exist, is truncated or altered, is not a checkpoint of this package, or has
            weights that are not finite.
    """
    if not path.exists():
        raise CheckpointError(sentence("checkpoint", f"{path}, which does not exist", _CHECKPOINT))
    try:
        payload = _load_folder(path, target) if path.is_dir() else load_archive(path, device)
    except (ArchiveError, OSError) as error:
        came = f"truncated, damaged or not a checkpoint ({error})"
        raise CheckpointError(sentence(str(path), came, _CHECKPOINT)) from error
    if not isinstance(payload, dict) or payload.get("format") != FORMAT:
        raise CheckpointError(sentence(str(path), "another kind of file", _CHECKPOINT))
    if (found := payload.get("format_version")) != FORMAT_VERSION:
        versions = payload.get("versions")
        writer = f"recurra {versions.get('recurra')}" if isinstance(versions, dict) else "another recurra"
        came = f"in checkpoint format {found} of {writer}"
        raise CheckpointError(sentence(str(path), came, f"format {FORMAT_VERSION}", f"open it with {writer}"))
    try:
        require_payload(payload, path)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    return payload


def _load_folder(path: Path, target: "Target | None") -> Any:
    from recurra.training.sharded_checkpoint import load_sharded  # slow to import

    return load_sharded(path, target)


def scored_weights(payload: Payload) -> dict[str, Tensor]:
    """Return the weights that the scores of a checkpoint belong to: the averaged ones if it has them."""
    average = payload["average"]
    weights: dict[str, Tensor] = payload["model"] if average is None else average["weights"]
    return weights


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Load the weights of a checkpoint into `model`.

    Raises:
        CheckpointError: they belong to another model; the message names parameters that differ.
    """
    if difference := shape_difference(model, weights):
        came = f"a checkpoint of another model (it has {difference})"
        raise CheckpointError(sentence(str(path), came, "one of this model"))
    model.load_state_dict(weights)


class CheckpointFolder:
    """The checkpoints of one run: the newest few, one file per step, and the best one.

    Several ranks write folders in place of files (`sharded_checkpoint.py`); both may lie side by side. A file has its
    step in its name and never moves. A killed process therefore always leaves the last checkpoint in
    place, which would not be certain if files called "last" and "previous" swapped places.
    """

    def __init__(self, path: Path, *, keep: int = 2) -> None:
        self.path = path
        self.keep = keep

    def steps(self) -> list[Path]:
        """List the checkpoints of steps, oldest first; copies under other names are none of them."""
        return sorted(self._named(r"step-\d{10,}(\.pt)?"), key=lambda path: path.stem)

    def _named(self, pattern: str) -> Iterator[Path]:
        return (path for path in self.path.glob("*") if re.fullmatch(pattern, path.name))

    def _file(self, step: int) -> Path:
        # Leading zeros make the order of names the order of steps.
        return self.path / f"step-{step:010d}.pt"

    @property
    def best(self) -> Path:
        """The path of the best checkpoint, whether it exists or not. Folders have a step in their names."""
        return max(self._named(_BEST), key=lambda path: path.stat().st_mtime_ns, default=self.path / "best.pt")

    def save(self, step: int, payload: Payload) -> Path:
        """Write the checkpoint of a step, then delete those that are too old to keep.

        Raises:
            OSError: it cannot be written. All earlier ones are still there; the message names the last.
        """
        target = self._file(step)
        self._write(target, payload)
        self._drop_old(target)
        return target

    def poll(self) -> None:
        """Give a checkpoint its name once it has been written: nothing to do where `save` waits for that."""

    def finish(self) -> None:
        """Wait until all that was saved is written. Raises OSError as `save` does."""

    def _drop_old(self, new: Path) -> None:
        """Delete the oldest checkpoints of steps but the new one, which is old where a run goes back."""
        for old in self.steps()[: -self.keep]:
            if old != new:
                discard(old)

    def save_best(self, payload: Payload) -> None:
        """Write the best checkpoint over the previous best one. Raises OSError as `save` does."""
        target = self.path / "best.pt"
        self._write(target, payload)
        self._keep_best(target)

    def _keep_best(self, target: Path) -> None:
        for other in self._named(_BEST):
            if other != target:
                discard(other)

    def _write(self, target: Path, payload: Payload) -> None:
        try:
            save_checkpoint(target, payload)
        except OSError as error:
            steps = self.steps()
            stands = f"the last one, {steps[-1]}, is whole" if steps else "there is none yet, so the run starts again"
            how = f"once it can, continue with `recurra train --resume {self.path.parent}`"
            raise OSError(f"{error}: {how}; {stands}") from error

    def drop_after(self, step: int) -> None:
        """Delete the checkpoints of later steps: a run that goes back to `step` writes them again."""
        for path in self.steps():
            if path.stem > self._file(step).stem:
                discard(path)

    def require_none_after(self, step: int) -> None:
        """Refuse checkpoints of later steps, which would be taken for those of a run that only comes to `step`.

        Raises:
            FileExistsError: there is one.
        """
        later = [path for path in self.steps() if path.stem > self._file(step).stem]
        if later:
            expected = f"a folder without checkpoints after step {step}"
            mend = f"resume that run, or choose another folder than {self.path.parent}"
            raise FileExistsError(sentence("the run's folder", f"one with {later[-1].name}", expected, mend))

    def find(self, which: str) -> Path:
        """Find the file for "last", "previous", "best" or a path.

        Raises:
            CheckpointError: there is no such file.
        """
        steps = self.steps()
        if which in ("last", "previous"):
            place = {"last": 1, "previous": 2}[which]
            if len(steps) < place:
                came = f"{which}, but {self.path} has {len(steps)}"
                raise CheckpointError(sentence("checkpoint", came, f"a folder with at least {place}"))
            return steps[-place]
        path = self.best if which == "best" else Path(which)
        if not path.exists():
            came = f"{path}, which does not exist"
            raise CheckpointError(sentence("checkpoint", came, "last, previous, best or the path of a file"))
        return path

    def load(
        self, which: str, device: torch.device | str = "cpu", *, target: "Target | None" = None
    ) -> tuple[Path, Payload]:
        """Find and read a checkpoint; `device` and `target` as for `load_checkpoint`.

        Raises:
            CheckpointError: it cannot be used. The message offers an older one if there is one.
        """
        path = self.find(which)
        try:
            return path, load_checkpoint(path, device, target=target)
        except CheckpointError as error:
            older = [other for other in self.steps() if other != path]
            if which == "last" and older:
                offer = f"The previous one, {older[-1]}, is still there: choose it with --checkpoint previous"
                raise CheckpointError(f"{error}\n{offer}") from error
            raise
