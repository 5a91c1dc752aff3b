"""The checkpoints of a run of several ranks: folders that all of them write, and any number of ranks reads."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from recurra.checks import sentence
from recurra.state import map_tensors
from recurra.training.checkpoint import CheckpointFolder, Payload, with_stamp
from recurra.training.payload import require_plain
from recurra.training.ranks import Ranks, share_of
from recurra.training.sharded_checkpoint import Writer, join_tensors, split_tensors


class RankCheckpoints(CheckpointFolder):
    """A `CheckpointFolder` whose methods are called by all ranks together.

    Args:
        path: the folder.
        keep: how many of the newest checkpoints to keep.
        ranks: the ranks of the run.
        asynchronous: return from `save` and `save_best` before the checkpoint is written.
    """

    def __init__(self, path: Path, *, keep: int, ranks: Ranks, asynchronous: bool) -> None:
        super().__init__(path, keep=keep)
        self._ranks = ranks
        self._writer = Writer(ranks, asynchronous=asynchronous)

    def _file(self, step: int) -> Path:
        return self.path / f"step-{step:010d}"

    def save(self, step: int, payload: Payload) -> Path:
        """Write the checkpoint of a step, or begin to; then delete those that are too old to keep."""
        target = self._file(step)
        require_plain(payload, target)
        self._writer.write(target, with_stamp(payload), lambda: self._drop_old(target))
        return target

    def save_best(self, payload: Payload) -> None:
        """Write the best checkpoint, or begin to; then delete the previous best one."""
        target = self.path / f"best-{payload['position']['step']:010d}"
        require_plain(payload, target)
        self._writer.write(target, with_stamp(payload), lambda: self._keep_best(target))

    def poll(self) -> None:
        """Give a checkpoint its name once it has been written."""
        self._writer.poll()

    def finish(self) -> None:
        """Wait until all that was saved is written."""
        self._writer.finish()

    def drop_after(self, step: int) -> None:
        """Delete the checkpoints of later steps."""
        if self._ranks.is_first:
            super().drop_after(step)
        self._ranks.wait()


class RankLayout:
    """Which part of a checkpoint's tensors this rank holds, with as many ranks as there are now.

    Weights, their average and what the optimiser keeps of them are laid out as the model is; carried states are shared
    out by streams; everything else is the same on every rank.

    Args:
        model: the model in training.
        optimizer: its optimiser.
        ranks: the ranks of the run.
        device: the kind of device that they compute on.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, ranks: Ranks, device: str) -> None:
        self._weights = dict(model.state_dict())
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._ranks, self._device = ranks, device

    def target(self, path: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """Make the empty tensor that an entry of a checkpoint folder is read into."""
        like = self._like(path, size)
        if like is not None:
            return torch.empty_like(like, dtype=dtype)
        if path.startswith("state/"):
            rows, rest = self._rows(path, size), size[1:]
            return self._of_all_streams(torch.empty((rows, *rest), dtype=dtype, device=self._device))
        return torch.empty(size, dtype=dtype)

    def lay_out(self, payload: Payload) -> Payload:
        """Take this rank's part of a whole checkpoint, as one process writes it."""
        plain, tensors = split_tensors(payload)
        parts: dict[str, Tensor] = {}
        for path, whole in tensors.items():
            like = self._like(path, whole.shape)
            if isinstance(like, DTensor):
                parts[path] = distribute_tensor(whole.to(like.device), like.device_mesh, like.placements)
            elif path.startswith("state/"):
                self._rows(path, whole.shape)
                parts[path] = share_of(self._ranks, whole)
            else:
                parts[path] = whole
        joined: Payload = join_tensors(plain, parts)
        return joined

    def whole_state(self, state: object) -> object:
        """Turn this rank's streams into tensors of all streams, for a checkpoint."""
        return map_tensors(self._of_all_streams, state)

    def own_state(self, state: object) -> object:
        """Turn tensors of all streams, as read from a checkpoint, into those of this rank's."""
        return map_tensors(lambda tensor: tensor.to_local() if isinstance(tensor, DTensor) else tensor, state)

    def _of_all_streams(self, rows: Tensor) -> Tensor:
        placements = [Shard(0), Replicate()]  # by streams, and alike on the ranks that share a sequence
        return DTensor.from_local(
            rows.detach().contiguous(), self._ranks.mesh(self._device), placements, run_check=False
        )

    def _like(self, path: str, size: torch.Size) -> Tensor | None:
        section, _, rest = path.partition("/")
        if section == "model":
            return self._weights.get(rest)
        if section == "average":
            return self._weights.get(rest.removeprefix("weights/"))
        if section == "optimizer":
            number = int(rest.split("/")[1]) if rest.startswith("state/") else -1
            own = self._parameters[number] if 0 <= number < len(self._parameters) else None
            return own.detach() if own is not None and own.shape == size and len(size) else None
        return None

    def _rows(self, path: str, size: torch.Size) -> int:
        if not len(size) or size[0] % self._ranks.data_count:
            expected = f"one whose first dimension counts streams that {self._ranks.data_count} ranks can share"
            raise ValueError(sentence(f"{path} of the checkpoint", f"of shape {tuple(size)}", expected))
        return int(size[0]) // self._ranks.data_count
