"""Checkpoints: written whole or not at all, and refused when they are not what was written.

A checkpoint is an ordinary `torch.save` file of plain data (tensors, numbers, strings, lists, dicts), read
with `weights_only=True`, so that opening one runs no code. The format is a zip archive: its directory lies
at the end, so a truncated file does not open, and each entry has a checksum, which PyTorch does not look at
and we do.
"""

import platform
import zipfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recurra.data.files import replacing

FORMAT = "recurra-checkpoint"
FORMAT_VERSION = 2

Payload = dict[str, Any]


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and what to do."""


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    return {
        "recurra": version("recurra"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def save_checkpoint(path: Path, payload: Payload) -> None:
    """Write `payload`, stamped with the format and the versions, atomically."""
    stamped = {"format": FORMAT, "format_version": FORMAT_VERSION, "versions": versions(), **payload}
    with replacing(path) as file:
        torch.save(stamped, file)


def load_checkpoint(path: Path, device: torch.device | str = "cpu") -> Payload:
    """Read a checkpoint after checking every byte of it.

    Raises:
        CheckpointError: the file is missing, truncated, altered, or no checkpoint of this package.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"wrong checksum in {damaged}")
        payload = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        # Whatever a broken archive makes zipfile or torch raise, the answer to it is the same.
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} is truncated or damaged, or no checkpoint at all ({reason})") from error
    if not isinstance(payload, dict) or payload.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by recurra train")
    if payload["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has the checkpoint format {payload['format_version']}, this version of recurra reads "
            f"{FORMAT_VERSION}; it was written by recurra {payload['versions']['recurra']}"
        )
    return payload


def scored_weights(payload: Payload) -> dict[str, Tensor]:
    """The weights of a checkpoint that its scores are of: the averaged ones, where it has them."""
    average = payload["average"]
    weights: dict[str, Tensor] = payload["model"] if average is None else average["weights"]
    return weights


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Load the weights of a checkpoint into `model`.

    Raises:
        CheckpointError: they are another model's; the message names parameters in which the two differ.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    saved = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    differing = sorted(name for name in shapes.keys() | saved.keys() if shapes.get(name) != saved.get(name))
    if differing:
        listed = ", ".join(
            f"{name} {saved.get(name, 'missing')}, here {shapes.get(name, 'missing')}" for name in differing[:3]
        )
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise CheckpointError(f"{path} is of another model: it has {listed}{more}")
    model.load_state_dict(weights)


class CheckpointFolder:
    """The checkpoints of one run: one file a step, the newest few kept, and the best one.

    A file carries its step in its name and is never moved, so there is no moment at which a kill could
    leave the run without its last checkpoint, as there is where files called "last" and "previous" swap
    places.
    """

    def __init__(self, path: Path, *, keep: int = 2) -> None:
        self.path = path
        self.keep = keep

    def steps(self) -> list[Path]:
        """The checkpoints there are, oldest first."""
        return sorted(self.path.glob("step-*.pt"))

    def _file(self, step: int) -> Path:
        # Zeros in front make the order of the names the order of the steps.
        return self.path / f"step-{step:010d}.pt"

    @property
    def best(self) -> Path:
        """Where the best checkpoint lies, if there is one."""
        return self.path / "best.pt"

    def save(self, step: int, payload: Payload) -> Path:
        """Write the checkpoint of a step, then drop the ones that are too old to keep."""
        target = self._file(step)
        save_checkpoint(target, payload)
        for old in self.steps()[: -self.keep]:
            old.unlink()
        return target

    def save_best(self, payload: Payload) -> None:
        """Write the best checkpoint, in the place of the one that was best before."""
        save_checkpoint(self.best, payload)

    def drop_after(self, step: int) -> None:
        """Remove the checkpoints of later steps: a run that goes back to `step` writes them anew."""
        for path in self.steps():
            if path.name > self._file(step).name:
                path.unlink()

    def find(self, which: str) -> Path:
        """The file that is meant by "last", "previous", "best" or a path.

        Raises:
            CheckpointError: there is none.
        """
        steps = self.steps()
        if which in ("last", "previous"):
            place = {"last": 1, "previous": 2}[which]
            if len(steps) < place:
                raise CheckpointError(f"{self.path} has no {which} checkpoint: it holds {len(steps)}")
            return steps[-place]
        path = self.best if which == "best" else Path(which)
        if not path.is_file():
            raise CheckpointError(f"there is no checkpoint {path}; use last, previous, best or a file's path")
        return path

    def load(self, which: str, device: torch.device | str = "cpu") -> tuple[Path, Payload]:
        """Find and read a checkpoint.

        Raises:
            CheckpointError: it cannot be used. Where an older one is there, the message offers it.
        """
        path = self.find(which)
        try:
            return path, load_checkpoint(path, device)
        except CheckpointError as error:
            older = [other for other in self.steps() if other != path]
            if which == "last" and older:
                offer = f"The one before it, {older[-1]}, is there: ask for it with --checkpoint previous"
                raise CheckpointError(f"{error}\n{offer}") from error
            raise
