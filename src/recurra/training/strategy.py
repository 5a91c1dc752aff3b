"""How several ranks hold one model: a copy on each (DDP), or every parameter in shards (FSDP2)."""

import os
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from recurra.models import LanguageModel
from recurra.training.config import TrainingConfig
from recurra.training.ranks import n_launched
from recurra.training.recomputed_blocks import blocks_of

if TYPE_CHECKING:
    from lightning_fabric.strategies import Strategy
    from torch.distributed.device_mesh import DeviceMesh

BACKEND = {"cpu": "cpu:gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""What carries tensors between ranks. The loop's own numbers are on the CPU also where the model is not."""
CALLED = ("loss", "hidden", "losses")
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
        return Copies(process_group_backend=BACKEND[accelerator])
    return ModelParallelStrategy(
        lambda objective, mesh: shard(objective, mesh["data_parallel"]),
        data_parallel_size=n_launched(),
        tensor_parallel_size=1,
        process_group_backend=BACKEND[accelerator],
    )


def shard(module: nn.Module, mesh: "DeviceMesh") -> nn.Module:
    """Shard the parameters of a model, or of the model of an `Objective`: one group for each block, one for the rest.

    Parameters that several blocks share stay in the last group.
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method  # slow to import

    # Blocks return what others only read: nothing here changes a view in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    model: nn.Module = getattr(module, "model", module)
    blocks = blocks_of(model)
    owners = Counter(id(parameter) for block in blocks for parameter in set(block.parameters()))
    alone = {id(parameter) for name, parameter in model.named_parameters()} & {p for p, n in owners.items() if n == 1}
    for block in blocks:
        if {id(parameter) for parameter in block.parameters()} <= alone:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for name in CALLED:
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)
    return module


def local(tensor: Tensor) -> Tensor:
    """Return the part of a parameter that this rank holds: the whole, unless it is sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a number that the ranks hold together, such as a norm, as one of this rank."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
