"""The processes that train one run together: which of them this is, and what they tell each other.

torchrun starts them. With `training.sequence_parallel` above 1, neighbouring ranks share the same sequences and hold
consecutive pieces of them; otherwise every rank has sequences of its own.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from recurra.checks import require
from recurra.data import Batch
from recurra.training.sequence_parallel import Pieces

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def n_launched() -> int:
    """Count the processes that torchrun started together with this one; 1 without torchrun."""
    count = os.environ.get("WORLD_SIZE", "1")
    return int(count) if count.isdecimal() and int(count) > 0 else 1


def is_first_launched() -> bool:
    """Say whether this is the first of the processes that torchrun started, or the only one."""
    return n_launched() == 1 or os.environ.get("RANK", "0") == "0"


class Ranks:
    """The ranks of a run, seen from one of them. With one rank, nothing is exchanged.

    Args:
        rank: of this process, from 0.
        count: how many there are; above 1, torch.distributed must be initialised.
        n_pieces: into how many pieces a sequence is cut.

    Raises:
        ValueError: `n_pieces` does not divide `count`.
    """

    def __init__(self, rank: int = 0, count: int = 1, n_pieces: int = 1) -> None:
        expected = f"a number that divides the {count} ranks"
        require(count % n_pieces == 0, "training.sequence_parallel", n_pieces, expected)
        self.rank, self.count = rank, count
        self.data_rank, self.piece = divmod(rank, n_pieces)
        self.data_count, self.n_pieces = count // n_pieces, n_pieces
        self._mesh: DeviceMesh | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the files and speaks for all."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        """Whether there is more than one rank."""
        return self.count > 1

    def mesh(self, device: str) -> "DeviceMesh":
        """Return the ranks as a mesh (data, sequence), on a kind of device: all ranks ask for it together."""
        from torch.distributed.device_mesh import init_device_mesh  # slow to import

        if self._mesh is None:
            shape = (self.data_count, self.n_pieces)
            self._mesh = init_device_mesh(device, shape, mesh_dim_names=("data", "sequence"))
        return self._mesh

    @property
    def pieces(self) -> Pieces | None:
        """The ranks that share this rank's sequences; None if it has its own."""
        if self.n_pieces == 1:
            return None
        return Pieces.of(self.mesh("cpu").get_group("sequence"))

    def cut(self, batch: Batch) -> Batch:
        """Take this rank's piece of the sequences of a batch.

        Raises:
            ValueError: they are shorter than there are pieces, or packed.
        """
        if self.n_pieces == 1:
            return batch
        n, most = self.n_pieces, batch.targets.shape[1]
        require(batch.cu_seqlens is None, "training.sequence_parallel", n, "1 for packed documents")
        require(
            most == batch.inputs.shape[1] >= n, "training.sequence_parallel", n, f"at most the {most} steps of a batch"
        )
        inputs, targets = (tensor.tensor_split(n, 1)[self.piece] for tensor in (batch.inputs, batch.targets))
        return batch._replace(inputs=inputs, targets=targets)

    def total_of_sequences(self, *values: int | float) -> list[float]:
        """Add up numbers of whole sequences, of which ranks that share them have the same."""
        return [value / self.n_pieces for value in self.total(*values)]

    def total(self, *values: int | float) -> list[float]:
        """Add up numbers over the ranks; whole numbers below 2^53 are exact."""
        if not self.several:
            return [float(value) for value in values]
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return [float(value) for value in sums]

    def any(self, here: bool) -> bool:
        """Say whether something holds on any rank."""
        return self.total(float(here))[0] > 0

    def gather(self, value: Any) -> list[Any]:
        """Collect small plain data of every rank, by rank."""
        values: list[Any] = [value] * self.count
        if self.several:
            dist.all_gather_object(values, value)
        return values

    def from_first(self, value: Any) -> Any:
        """Return the first rank's value on every rank."""
        values = [value]
        if self.several:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def wait(self) -> None:
        """Wait until every rank is here."""
        if self.several:
            dist.barrier()


def share_of(ranks: Ranks, rows: Sequence[Any] | torch.Tensor) -> Any:
    """Return this rank's part of something with one entry per sequence, which the ranks share in order."""
    n = len(rows) // ranks.data_count
    return rows[ranks.data_rank * n : (ranks.data_rank + 1) * n]
