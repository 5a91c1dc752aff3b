"""The ranks that train a run together: how they start, what they exchange, how they hold a model (DDP and FSDP2)."""

import logging
import os
import warnings
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recurra._process import chosen_device, has_native_bfloat16, n_launched
from recurra.checks import require, sentence
from recurra.data.batches import Batch
from recurra.models.language_model import LanguageModel
from recurra.models.shell import recompute
from recurra.train.config import TrainingConfig
from recurra.train.sequence_parallel import Pieces

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from torch.distributed.device_mesh import DeviceMesh


def precision_note(asked: str, chosen: str, device: str) -> str:
    """Return a note on the precision `chosen` for `training.precision` (`asked`) on a device; empty if none is due."""
    name = "GPU" if device == "cuda" else "CPU"
    if asked == "auto":
        has = "has" if chosen == "bf16-mixed" else "has no"
        return f"note: training.precision auto is {chosen} here: this {name} {has} native bfloat16"
    if chosen == "bf16-mixed" and not has_native_bfloat16(device):
        return (
            f"warning: training.precision is bf16-mixed, and this {name} has no native bfloat16: it is slower than "
            "float32; new runs can use 32-true or auto"
        )
    return ""


def set_up_process(config: TrainingConfig) -> "Fabric":
    """Set up this process as a `settled` config says, including seeds, and return the Fabric that places the model."""
    # slow to import
    from lightning_fabric import Fabric
    from lightning_fabric.utilities.seed import seed_everything

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.deterministic:
        # cuBLAS reads this when it starts; without it, deterministic mode raises an error on a GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic)
    torch.backends.cudnn.allow_tf32 = False  # it is True by default, and float32 is to mean float32
    seed_everything(config.seed, verbose=False)
    accelerator = chosen_device(config.accelerator)
    if n_launched() > 1:
        logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it greets from every rank
    fabric = Fabric(accelerator=accelerator, precision=config.precision, **fabric_options(config, accelerator))
    fabric.launch()
    return fabric


def reseed(config: TrainingConfig, rank: int) -> None:
    """Give a rank random numbers of its own, once all ranks have made the same model. The first keeps those it has."""
    if rank:
        from lightning_fabric.utilities.seed import seed_everything

        seed_everything((config.seed + rank) % 2**32, verbose=False)


def settled(config: TrainingConfig) -> TrainingConfig:
    """Replace what `config` leaves to this machine and a run has to keep: `precision: auto`."""
    if config.precision != "auto":
        return config
    native = has_native_bfloat16(chosen_device(config.accelerator))
    return replace(config, precision="bf16-mixed" if native else "32-true")


def fabric_options(config: TrainingConfig, accelerator: str) -> dict[str, Any]:
    """Return what Fabric has to know of the ranks that torchrun started; for one process, that it is alone."""
    if n_launched() == 1:
        return {"devices": 1}
    from lightning_fabric.plugins.environments import TorchElasticEnvironment
    from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy

    class Copies(DDPStrategy):
        def setup_module(self, module: nn.Module) -> nn.Module:
            # A batch may reach no word of a cluster of an adaptive softmax, on one rank or on all.
            self._ddp_kwargs["find_unused_parameters"] = not isinstance(module.model, LanguageModel)
            return super().setup_module(module)

    # The loop's own numbers are on the CPU also where the model is not.
    backend = {"cpu": "cpu:gloo", "cuda": "cpu:gloo,cuda:nccl"}[accelerator]
    strategy: Any = Copies(process_group_backend=backend)
    if config.strategy == "fsdp":
        strategy = ModelParallelStrategy(
            lambda objective, mesh: shard(objective, mesh["data_parallel"]),
            data_parallel_size=n_launched(),
            tensor_parallel_size=1,
            process_group_backend=backend,
        )
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes, plugins = n_launched() // here, [TorchElasticEnvironment()]
    return {"devices": here, "num_nodes": nodes, "strategy": strategy, "plugins": plugins}


class Ranks:
    """The ranks of a run, seen from one of them. With one rank, nothing is exchanged.

    With several pieces, neighbouring ranks share the same sequences and hold consecutive pieces of them.
    """

    def __init__(self, rank: int = 0, count: int = 1, n_pieces: int = 1) -> None:
        expected = f"a number that divides the {count} ranks"
        require(count % n_pieces == 0, "training.sequence_parallel", n_pieces, expected)
        self.rank, self.count = rank, count
        self.data_rank, self.piece = divmod(rank, n_pieces)
        self.data_count, self.n_pieces = count // n_pieces, n_pieces
        self.is_first = rank == 0  # which writes the files and speaks for all
        self.several = count > 1
        self._mesh: DeviceMesh | None = None

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


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    """List the blocks of a model: the entries of its own module lists."""
    return [block for child in model.children() if isinstance(child, nn.ModuleList) for block in child]


def recompute_blocks(model: nn.Module) -> None:
    """Let every block keep its inputs alone for the backward pass, and compute the rest again there (1604.06174)."""
    blocks = _blocks_of(model)
    if not blocks:
        got = f"true, and {type(model).__name__} has none"
        raise ValueError(sentence("training.checkpoint_blocks", got, "false for this model"))
    for block in blocks:
        recompute(block)


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
    for name in ("loss", "hidden", "losses"):  # by which a model is called, beside forward
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)
    return module


def local(tensor: Tensor) -> Tensor:
    """Return the part of a parameter that this rank holds: the whole, unless it is sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a number that the ranks hold together, such as a norm, as one of this rank."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
