"""Checkpoints of several ranks: each writes its own part of the tensors, and any number of ranks reads them again.

A checkpoint is a folder. Each rank writes `rank-00003.safetensors`, and the first one `manifest.json`: everything that
is not a tensor, which box of which tensor is in which file, and digests. The folder gets its name when all of it is on
disk, so that no kill leaves half a checkpoint under that name.
"""

import os
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from recurra._files.digests import MANIFEST, file_sha256, read_stamped, require_files, write_stamped
from recurra._files.weights import write_safetensors
from recurra._files.writing import discard, naming, sync_folder
from recurra.checks import sentence
from recurra.train._ranks import Ranks, local
from recurra.train.checkpoint import SUFFIX, CheckpointFolder, Payload, join_tensors, split_tensors, with_versions

Place = Callable[[str, Tensor], Tensor]
"""Returns this rank's part of a whole tensor of a checkpoint, by its name."""


class _Box(NamedTuple):
    """A part of a tensor: where it begins, and its shape."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


def _box_of(tensor: Tensor) -> _Box:
    if not isinstance(tensor, DTensor):
        return _Box((0,) * tensor.dim(), tuple(tensor.shape))
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return _Box(tuple(start), tuple(shape))


class _Pending(NamedTuple):
    """A checkpoint that is being written: its folders, this rank's part, and what follows."""

    target: Path
    temporary: Path
    digest: "Future[str]"
    plain: Any
    boxes: dict[str, _Box]
    tensors: dict[str, Any]
    done: Callable[[Path], None]


def _on_cpu(tensor: Tensor, *, copy: bool) -> Tensor:
    here = local(tensor.detach()).resolve_conj()
    return (torch.view_as_real(here) if here.is_complex() else here).to("cpu", copy=copy)


def _write_part(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a rank's file into a folder that has no name yet, and return its digest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file, naming(path):
        write_safetensors(file, tensors, {})
        file.flush()
        os.fsync(file.fileno())
    return file_sha256(path)


def _name(pending: _Pending, parts: list[tuple[str, dict[str, _Box]]]) -> None:
    """Write the manifest, and give the folder its name."""
    for rank, (_, of_rank) in enumerate(parts):
        for name, box in of_rank.items():
            pending.tensors[name]["boxes"].append([rank, box.start, box.shape])
    files = {f"rank-{rank:05d}{SUFFIX}": digest for rank, (digest, _) in enumerate(parts)}
    manifest = {"content": pending.plain, "tensors": pending.tensors, "files": files}
    write_stamped(pending.temporary / MANIFEST, manifest)
    sync_folder(pending.temporary)
    discard(pending.target)  # there if a killed process wrote it after the checkpoint that this run goes on from
    pending.temporary.rename(pending.target)
    sync_folder(pending.target.parent)
    pending.done(pending.target)


def load_sharded(path: Path, place: Place | None = None) -> Payload:
    """Check and read a checkpoint folder: whole tensors or, with `place`, this rank's part of each."""
    manifest = read_stamped(path / MANIFEST)
    require_files(path, manifest["files"])
    parts = [safe_open(path / name, framework="pt") for name in sorted(manifest["files"])]
    tensors = {}
    for name, entry in manifest["tensors"].items():
        whole = _read(name, entry, parts)
        tensors[name] = whole if place is None else place(name, whole)
    return dict(join_tensors(manifest["content"], tensors))


def _read(name: str, entry: Mapping[str, Any], parts: list[Any]) -> Tensor:
    """Put the boxes of a tensor together."""
    tensor = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    for rank, start, shape in entry["boxes"]:
        numbers[tuple(slice(first, first + n) for first, n in zip(start, shape))] = parts[rank].get_tensor(name)
    return tensor


class RankCheckpoints(CheckpointFolder):
    """A `CheckpointFolder` whose methods are called by all ranks together.

    asynchronous: let training continue while a checkpoint is written, from a copy of its tensors.
    """

    def __init__(self, path: Path, *, keep: int, ranks: Ranks, asynchronous: bool) -> None:
        super().__init__(path, keep=keep)
        self._ranks, self._asynchronous = ranks, asynchronous
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: _Pending | None = None

    def _file(self, step: int) -> Path:
        return self.path / f"step-{step:010d}"

    def _best_file(self, payload: Payload) -> Path:
        return self.path / f"best-{payload['position']['step']:010d}"

    def drop_after(self, step: int) -> None:
        if self._ranks.is_first:
            super().drop_after(step)
        self._ranks.wait()

    def _write(self, target: Path, payload: Payload, done: Callable[[Path], None]) -> None:
        """Begin to write; `done` is called on the first rank once the checkpoint has its name."""
        self.finish()
        plain, tensors = split_tensors(with_versions(payload), target)
        temporary = target.with_name(f".{target.name}.{self._ranks.from_first(secrets.token_hex(8))}.tmp")
        own = {name: tensor for name, tensor in tensors.items() if self._writes(tensor)}
        # A copy, if training goes on: the next update changes the weights in place.
        parts = {name: _on_cpu(tensor, copy=self._asynchronous) for name, tensor in own.items()}
        digest = self._thread.submit(_write_part, temporary / f"rank-{self._ranks.rank:05d}{SUFFIX}", parts)
        described = {
            name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "boxes": []}
            for name, tensor in tensors.items()
        }
        boxes = {name: _box_of(tensor) for name, tensor in own.items()}
        self._pending = _Pending(target, temporary, digest, plain, boxes, described, done)
        if not self._asynchronous:
            self.finish()

    def _writes(self, tensor: Tensor) -> bool:
        """Say whether this rank writes its part: of those that have the same, only the first does."""
        if not isinstance(tensor, DTensor):
            return self._ranks.is_first
        coordinate = tensor.device_mesh.get_coordinate() or ()
        alike = [place for place, how in zip(coordinate, tensor.placements) if isinstance(how, Replicate)]
        return not any(alike) and 0 not in _box_of(tensor).shape

    def finish(self) -> None:
        """Wait for a checkpoint that is being written, and give it its name. Raises OSError."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        error, digest = None, ""
        try:
            digest = pending.digest.result()
        except (OSError, ValueError) as failed:
            error = failed
        parts = self._ranks.gather((digest, pending.boxes, None if error is None else str(error)))
        reasons = [reason for *_, reason in parts if reason is not None]
        if self._ranks.is_first and not reasons:
            try:
                _name(pending, [(digest, boxes) for digest, boxes, _ in parts])
            except OSError as failed:
                error, reasons = failed, [str(failed)]
        reasons = self._ranks.from_first(reasons)
        if reasons:
            got = f"a checkpoint that cannot be written ({reasons[0]})"
            raise OSError(sentence(str(pending.target), got, "a folder that can be written")) from error

    def poll(self) -> None:
        """Name a checkpoint that has been written in the meantime; returns at once if it has not."""
        if self._pending is not None and self._ranks.total(float(self._pending.digest.done()))[0] == self._ranks.count:
            self.finish()


class RankLayout:
    """Which part of a checkpoint's tensors this rank holds, with as many ranks as there are now.

    Weights, their average and the optimiser's state are distributed as the model is, carried states by streams.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, ranks: Ranks, device: str) -> None:
        self._weights = dict(model.state_dict())
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._ranks, self._device = ranks, device

    def place(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor of a checkpoint."""
        like = self._like(name, whole.shape)
        if isinstance(like, DTensor):
            return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements)
        if name.startswith("state.") and whole.dim():
            return whole.split(self._rows(name, whole.shape))[self._ranks.data_rank].clone()
        return whole

    def of_all_streams(self, rows: Tensor) -> Tensor:
        """Turn this rank's streams into a distributed tensor of all streams; each rank holds its own. Not numbers."""
        if not rows.dim():
            return rows
        placements = [Shard(0), Replicate()]  # by streams, and alike on the ranks that share a sequence
        return DTensor.from_local(
            rows.detach().contiguous(), self._ranks.mesh(self._device), placements, run_check=False
        )

    def _like(self, name: str, size: torch.Size) -> Tensor | None:
        section, _, rest = name.partition(".")
        if section == "model":
            return self._weights.get(rest)
        if section == "average":
            return self._weights.get(rest.removeprefix("weights."))
        if section == "optimizer":
            number = int(rest.split(".")[1]) if rest.startswith("state.") else -1
            own = self._parameters[number] if 0 <= number < len(self._parameters) else None
            return own.detach() if own is not None and own.shape == size and len(size) else None
        return None

    def _rows(self, name: str, size: torch.Size) -> int:
        if size[0] % self._ranks.data_count:
            expected = f"one whose first dimension counts streams that {self._ranks.data_count} ranks can share"
            raise ValueError(sentence(f"{name} of the checkpoint", f"of shape {tuple(size)}", expected))
        return int(size[0]) // self._ranks.data_count
