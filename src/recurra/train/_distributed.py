"""The processes that train one run together, and how they hold one model: copies (DDP) or shards (FSDP2)."""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recurra.checks import require, sentence
from recurra.data.batches import Batch
from recurra.models.language_model import LanguageModel
from recurra.train.config import TrainingConfig
from recurra.train.sequence_parallel import Pieces

if TYPE_CHECKING:
    from lightning_fabric.strategies import Strategy
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

    With several pieces, neighbouring ranks share the same sequences and hold consecutive pieces of them.

    Args:
        rank: of this process, from 0.
        count: how many there are; above 1, torch.distributed must be initialised.
        n_pieces: into how many pieces a sequence is cut.
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
        """Take this rank's piece of the sequences of a batch."""
        if self.n_pieces == 1:
            return batch
        n, most = self.n_pieces, batch.targets.shape[1]
        require(batch.cu_seqlens is None, "training.sequence_parallel", n, "1 for packed documents")
        fits = most == batch.inputs.shape[1] >= n
        require(fits, "training.sequence_parallel", n, f"at most the {most} steps of a batch")
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


# --- activation checkpointing ---


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    """List the blocks of a model: the entries of its own module lists."""
    return [block for child in model.children() if isinstance(child, nn.ModuleList) for block in child]


def recompute_blocks(model: nn.Module) -> None:
    """Let every block of `model` keep its inputs alone for the backward pass, and compute the rest again there.

    Outputs and gradients stay the same, dropout included. Without gradients nothing changes. (Chen et al., arXiv
    1604.06174.)
    """
    blocks = _blocks_of(model)
    if not blocks:
        got = f"true, and {type(model).__name__} has none"
        raise ValueError(sentence("training.checkpoint_blocks", got, "false for this model"))
    for block in blocks:
        # A partial of a bound method, because copies of the model then call their own blocks.
        block.forward = partial(_recomputed, block.forward)


def _recomputed(forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*given, **named)
    return checkpoint(forward, *given, use_reentrant=False, **named)


# --- strategies ---

_BACKEND = {"cpu": "cpu:gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""What carries tensors between ranks. The loop's own numbers are on the CPU also where the model is not."""
_CALLED = ("loss", "hidden", "losses")
"""Methods by which a model is called, beside forward."""


def fabric_options(config: TrainingConfig, accelerator: str) -> dict[str, Any]:
    """Return what Fabric has to know of the ranks that torchrun started; for one process, that it is alone."""
    if n_launched() == 1:
        return {"devices": 1}
    from lightning_fabric.plugins.environments import TorchElasticEnvironment

    here = int(os.environ["LOCAL_WORLD_SIZE"])
    return {
        "devices": here,
        "num_nodes": n_launched() // here,
        "strategy": _strategy(config, accelerator),
        "plugins": [TorchElasticEnvironment()],
    }


def _strategy(config: TrainingConfig, accelerator: str) -> "Strategy":
    from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy

    class Copies(DDPStrategy):
        def setup_module(self, module: nn.Module) -> nn.Module:
            # A batch may reach no word of a cluster of an adaptive softmax, on one rank or on all.
            self._ddp_kwargs["find_unused_parameters"] = not isinstance(module.model, LanguageModel)
            return super().setup_module(module)

    if config.strategy != "fsdp":
        return Copies(process_group_backend=_BACKEND[accelerator])
    return ModelParallelStrategy(
        lambda objective, mesh: shard(objective, mesh["data_parallel"]),
        data_parallel_size=n_launched(),
        tensor_parallel_size=1,
        process_group_backend=_BACKEND[accelerator],
    )


def shard(module: nn.Module, mesh: "DeviceMesh") -> nn.Module:
    """Shard the parameters of a model, or of the model of an `Objective`: one group for each block, one for the rest.

    Parameters that several blocks share stay in the last group.
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method  # slow to import

    # Blocks return what others only read: nothing here changes a view in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    model: nn.Module = getattr(module, "model", module)
    blocks = _blocks_of(model)
    owners = Counter(id(parameter) for block in blocks for parameter in set(block.parameters()))
    alone = {id(parameter) for name, parameter in model.named_parameters()} & {p for p, n in owners.items() if n == 1}
    for block in blocks:
        if {id(parameter) for parameter in block.parameters()} <= alone:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for name in _CALLED:
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)
    return module


def local(tensor: Tensor) -> Tensor:
    """Return the part of a parameter that this rank holds: the whole, unless it is sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a number that the ranks hold together, such as a norm, as one of this rank."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
