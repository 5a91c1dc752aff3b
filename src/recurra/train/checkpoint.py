"""Checkpoints: written whole or not at all, and refused if they have changed since.

A checkpoint is a safetensors file. Its tensors have names such as `optimizer.state.0.exp_avg`; everything else is JSON
in the metadata, where `{"<tensor>": name}` stands for each tensor, with a digest of all of it. Several ranks write a
folder of such files (`_distributed_checkpoint.py`).
"""

import json
import os
import platform
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recurra import __version__
from recurra._files.digests import MANIFEST, content_digest
from recurra._files.reading import parse_json
from recurra._files.weights import read_metadata, read_safetensors, require_finite, shape_difference, write_safetensors
from recurra._files.writing import NO_ROOM, discard, free_bytes, replacing
from recurra.checks import kind_of, sentence

if TYPE_CHECKING:
    from recurra.train._distributed_checkpoint import Place

_FORMAT = "recurra checkpoint"
SUFFIX = ".safetensors"
_CHECKPOINT = "a checkpoint of recurra train"
_STEP, _BEST = r"step-\d{10,}(\.safetensors)?", r"best(\.safetensors|-\d{10,})"
_METADATA = "recurra"
_MALFORMED = (LookupError, TypeError, ValueError, RuntimeError, AttributeError)

Payload = dict[str, Any]


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and says what to do."""


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    return {"recurra": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def with_versions(payload: Payload) -> Payload:
    """Add the format and the versions."""
    return {"format": _FORMAT, "versions": versions(), **payload}


_TENSOR, _ITEMS = "<tensor>", "<items>"
_PLAIN = "plain data: numbers, strings, None and tensors, in lists and dicts"


def split_tensors(payload: Mapping[str, Any], path: Path) -> tuple[Any, dict[str, Tensor]]:
    """Split nested dicts and lists into what JSON can hold and tensors by name (model.head.weight); tied ones once."""
    tensors: dict[str, Tensor] = {}
    names: dict[Any, str] = {}

    def walk(value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            # FSDP pads memory, so even a rank without a part of a tied tensor counts it once.
            here = value.to_local() if hasattr(value, "to_local") else value
            memory = _address(here)
            key = (memory, here.storage_offset(), value.shape, here.stride(), here.dtype) if memory else name
            if key not in names:
                while name in tensors:  # a key with a dot can lead to the same name
                    name += "'"
                names[key], tensors[name] = name, value
            return {_TENSOR: names[key]}
        if isinstance(value, Mapping):
            if all(isinstance(key, str) for key in value):
                return {key: walk(item, f"{name}.{key}") for key, item in value.items()}
            if bad := [key for key in value if not isinstance(key, (int, str))]:
                raise ValueError(sentence(f"a key of {name} in {path}", kind_of(bad[0]), "a string or a whole number"))
            return {_ITEMS: [[key, walk(item, f"{name}.{key}")] for key, item in value.items()]}
        if isinstance(value, (list, tuple)):
            return [walk(item, f"{name}.{number}") for number, item in enumerate(value)]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise ValueError(sentence(f"{name} in {path}", kind_of(value), _PLAIN))

    return {key: walk(value, key) for key, value in payload.items()}, tensors


def _address(tensor: Tensor) -> int:
    """Where a tensor's memory begins; 0 for one of a device without addresses."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def join_tensors(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Put tensors back where `split_tensors` took them from."""
    if isinstance(plain, list):
        return [join_tensors(item, tensors) for item in plain]
    if not isinstance(plain, Mapping):
        return plain
    if plain.keys() == {_TENSOR}:
        return tensors[plain[_TENSOR]]
    items = plain[_ITEMS] if plain.keys() == {_ITEMS} else plain.items()
    return {key: join_tensors(item, tensors) for key, item in items}


def _save_checkpoint(path: Path, payload: Payload) -> None:
    """Write `payload` atomically, with the format and the versions."""
    plain, tensors = split_tensors(with_versions(payload), path)
    tensors = {name: tensor.detach().cpu().resolve_conj() for name, tensor in tensors.items()}
    described = {
        "content": plain,
        "complex": [name for name, tensor in tensors.items() if tensor.is_complex()],  # which the format may lack
        # As in memory, on which the order of sums can depend, such as those over the bases of SOAP.
        "strides": {name: torch.empty_like(t).stride() for name, t in tensors.items() if not t.is_contiguous()},
    }
    metadata = {_METADATA: json.dumps({**described, "sha256": content_digest(described, tensors)})}
    pairs = {name: torch.view_as_real(tensors[name]) for name in described["complex"]}
    try:
        with replacing(path) as file:
            write_safetensors(file, tensors | pairs, metadata)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in NO_ROOM:
            needed = sum(tensor.nbytes for tensor in tensors.values())
            reason += f"; it needs about {needed:,} bytes, and {free_bytes(path.parent):,} are free"
        got = f"a checkpoint that cannot be written ({reason})"
        raise OSError(sentence(str(path), got, "a file that can be written")) from error


def load_checkpoint(
    path: Path, device: torch.device | str = "cpu", *, place: "Place | None" = None, scored_only: bool = False
) -> Payload:
    """Check every byte of a checkpoint, and read it.

    Args:
        path: a file, or the folder that several ranks wrote.
        device: where the tensors of a file go.
        place: returns a rank's part of each tensor; None keeps all of it.
        scored_only: copy only the weights that are scored into memory. All other tensors of a file stay mapped to it.

    Raises:
        CheckpointError: the file does not exist, is truncated or altered, is not a checkpoint of this package, or has
            weights that are not finite.
    """
    if not path.exists():
        raise CheckpointError(sentence("checkpoint", f"{path}, which does not exist", _CHECKPOINT))
    try:
        if path.is_dir():
            from recurra.train._distributed_checkpoint import load_sharded  # slow to import

            payload = load_sharded(path, place)
        else:
            payload = _load_file(path, device, place, scored_only)
        if (found := payload.get("format")) != _FORMAT:
            raise ValueError(sentence(f"the format of {path}", repr(found), repr(_FORMAT)))
        require_finite(payload["model"], path)
        if payload["average"] is not None:
            require_finite(scored_weights(payload), path)
    except OSError as error:
        raise CheckpointError(sentence(str(path), f"unreadable ({error})", _CHECKPOINT)) from error
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    except _MALFORMED as error:
        got = f"without a part of a checkpoint ({error})"
        raise CheckpointError(sentence(str(path), got, _CHECKPOINT)) from error
    return payload


def _load_file(path: Path, device: torch.device | str, place: "Place | None", scored_only: bool) -> Payload:
    tensors, metadata = read_safetensors(path, _CHECKPOINT)
    if _METADATA not in metadata:
        raise ValueError(sentence(str(path), "another kind of file", _CHECKPOINT))
    found = parse_json(metadata[_METADATA], f"the metadata of {path}")
    try:
        digest, strides = found.pop("sha256"), found["strides"]
        tensors |= {name: torch.view_as_complex(tensors[name]) for name in found["complex"]}
        if digest != content_digest(found, tensors):
            raise ValueError("another digest")
        # Copies: what the library reads is a part of the file until it is touched.
        scored: dict[str, Any] = scored_weights(found["content"]) if scored_only else {}
        for name in {item[_TENSOR] for item in scored.values()} or tensors:
            tensors[name] = _copy(tensors[name], device, strides.get(name))
    except _MALFORMED as error:
        got = "damaged: its content does not match its digest"
        raise ValueError(sentence(str(path), got, _CHECKPOINT)) from error
    tensors = tensors if place is None else {name: place(name, tensor) for name, tensor in tensors.items()}
    return dict(join_tensors(found["content"], tensors))


def _copy(tensor: Tensor, device: torch.device | str, strides: list[int] | None) -> Tensor:
    if strides is None:
        return tensor.to(device, copy=True)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=device).copy_(tensor)


def is_checkpoint_file(path: Path) -> bool:
    """Say whether a path is a checkpoint rather than other weights: a file, or a folder of several ranks."""
    if path.is_dir():
        return (path / MANIFEST).is_file() and any(path.glob(f"rank-*{SUFFIX}"))
    if path.suffix != SUFFIX or not path.is_file():
        return False
    with suppress(ValueError):  # a damaged one is named by whatever reads it
        return f'"{_FORMAT}"' in read_metadata(path).get(_METADATA, "")
    return False


def scored_weights(payload: Payload) -> dict[str, Tensor]:
    """Return the weights that the scores of a checkpoint belong to: the averaged ones if it has them."""
    average = payload["average"]
    weights: dict[str, Tensor] = payload["model"] if average is None else average["weights"]
    return weights


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Load the weights of a checkpoint into `model`. Raises CheckpointError if they belong to another model."""
    require_fitting(model, weights, path)
    model.load_state_dict(weights)


def require_fitting(model: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Raise CheckpointError if the weights belong to another model."""
    if difference := shape_difference(model, weights):
        got = f"a checkpoint of another model (it has {difference})"
        raise CheckpointError(sentence(str(path), got, "one of this model"))


def _best_step(path: Path) -> int:
    """Find the step of a best checkpoint: in the name of a folder, and in a file. The clock may have been set back."""
    if path.suffix != SUFFIX:
        return int(path.name.rpartition("-")[2])
    with suppress(OSError, *_MALFORMED):
        return int(_described(path)["position"]["step"])
    return -1


def _described(path: Path) -> Any:
    """Read what a file holds besides tensors, without checking it."""
    return parse_json(read_metadata(path)[_METADATA], str(path))["content"]


class CheckpointFolder:
    """The checkpoints of one run: the newest few, one file per step, and the best one.

    Several ranks write folders in place of files; both may lie side by side. Files carry their step in the name and
    never move, so a killed process always leaves the last checkpoint in place.
    """

    def __init__(self, path: Path, *, keep: int = 2) -> None:
        self.path = path
        self.keep = keep

    def steps(self) -> list[Path]:
        """List the checkpoints of steps, oldest first; copies under other names are none of them."""
        return sorted(self._named(_STEP), key=lambda path: path.stem)

    def _named(self, pattern: str) -> Iterator[Path]:
        return (path for path in self.path.glob("*") if re.fullmatch(pattern, path.name))

    def _file(self, step: int) -> Path:
        # Leading zeros make the order of names the order of steps.
        return self.path / f"step-{step:010d}{SUFFIX}"

    def _best_file(self, payload: Payload) -> Path:
        return self.path / f"best{SUFFIX}"

    @property
    def best(self) -> Path:
        """The path of the best checkpoint, whether it exists or not: a killed process may have left two."""
        found = list(self._named(_BEST))
        return max(found, key=_best_step) if len(found) > 1 else (found or [self.path / f"best{SUFFIX}"])[0]

    def save(self, step: int, payload: Payload) -> Path:
        """Write the checkpoint of a step, then delete those that are too old to keep; an OSError deletes none."""
        target = self._file(step)
        self._write(target, payload, self._drop_old)
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
        self._write(self._best_file(payload), payload, self._keep_best)

    def call_best(self, step: int) -> None:
        """Make a step's checkpoint the best one too: a hard link if the file system has them, otherwise a copy."""
        target = self.path / f"best{SUFFIX}"
        try:
            os.link(self._file(step), target)
        except OSError:
            shutil.copyfile(self._file(step), target)

    def _keep_best(self, target: Path) -> None:
        for other in self._named(_BEST):
            if other != target:
                discard(other)

    def _write(self, target: Path, payload: Payload, done: Callable[[Path], None]) -> None:
        """Write a checkpoint, then call `done` with its path."""
        try:
            _save_checkpoint(target, payload)
        except OSError as error:
            steps = self.steps()
            stands = f"the last one, {steps[-1]}, is whole" if steps else "there is none yet, so the run starts again"
            how = f"once it can, continue with `recurra train --resume {shlex.quote(str(self.path.parent))}`"
            raise OSError(f"{error}: {how}; {stands}") from error
        done(target)

    def _after(self, step: int) -> list[Path]:
        return [path for path in self.steps() if path.stem > self._file(step).stem]

    def drop_after(self, step: int) -> None:
        """Delete the checkpoints of later steps: a run that goes back to `step` writes them again."""
        for path in self._after(step):
            discard(path)

    def require_none_after(self, step: int) -> None:
        """Refuse (FileExistsError) checkpoints of later steps, which would be taken for those of this run."""
        if later := self._after(step):
            expected = f"a folder without checkpoints after step {step}"
            hint = f"resume that run, or choose another folder than {self.path.parent}"
            raise FileExistsError(sentence("the run's folder", f"one with {later[-1].name}", expected, hint))

    def find(self, which: str) -> Path:
        """Find the file for "last", "previous", "best" or a path. Raises CheckpointError."""
        steps = self.steps()
        if which in ("last", "previous"):
            place = {"last": 1, "previous": 2}[which]
            if len(steps) < place:
                got = f"{which}, but {self.path} has {len(steps)}"
                raise CheckpointError(sentence("checkpoint", got, f"a folder with at least {place}"))
            return steps[-place]
        path = self.best if which == "best" else Path(which)
        if not path.exists():
            got = f"{path}, which does not exist"
            hint = ""
            if which == "best" and steps:
                hint = f"without a validation so far, there is only the last one, {steps[-1]} (--checkpoint last)"
            raise CheckpointError(sentence("checkpoint", got, "last, previous, best or the path of a file", hint))
        return path

    def require_trained(self, which: str) -> None:
        """Refuse (CheckpointError) a checkpoint that `recurra convert` wrote: it has weights and no optimiser."""
        source = None
        with suppress(OSError, *_MALFORMED):  # a missing or damaged one is named by whatever reads it
            path = self.find("best" if which == "last" and not self.steps() else which)
            source = _described(path).get("converted_from")
        if source is not None:
            got = f"one that `recurra convert` made from {source}, without the optimiser's state"
            folder = shlex.quote(str(self.path.parent))
            hint = f"start a new run from these weights, with `recurra train RECIPE --init_from {folder}`"
            raise CheckpointError(sentence(str(path), got, "a checkpoint that training can continue from", hint))

    def load(
        self,
        which: str,
        device: torch.device | str = "cpu",
        *,
        place: "Place | None" = None,
        scored_only: bool = False,
    ) -> tuple[Path, Payload]:
        """Find and read a checkpoint; a CheckpointError offers an older one if there is one.

        If the process that trains replaces it meanwhile, the new one is read.
        """
        path = self.find(which)
        try:
            return path, load_checkpoint(path, device, place=place, scored_only=scored_only)
        except CheckpointError as error:
            if self.find(which) != path:
                return self.load(which, device, place=place, scored_only=scored_only)
            older = [other for other in self.steps() if other != path]
            if which == "last" and older:
                offer = f"The previous one, {older[-1]}, is still there: choose it with --checkpoint previous"
                raise CheckpointError(f"{error}\n{offer}") from error
            raise
