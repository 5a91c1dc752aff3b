"""How much room a run's checkpoints take, known before the first one is written."""

from pathlib import Path

from torch import nn

from recurra.files.writing import free_bytes
from recurra.training.config import AveragingConfig, OptimizerConfig
from recurra.training.muon import matrix_ids
from recurra.training.optimizer import transition_parameter_ids
from recurra.training.soap import kept_numbers
from recurra.training.strategy import local

ROOM_FOR = 3
"""Checkpoints that the disk should have room for: a run keeps the newest and the best, and writes the next before it
deletes the oldest."""


def checkpoint_bytes(model: nn.Module, optimizer: OptimizerConfig, averaging: AveragingConfig) -> int:
    """Estimate the size of a checkpoint: weights, their average, and what the optimiser keeps for each parameter.

    Carried states and the format itself are not counted; beside the weights of a model they are small.
    """
    tensors = model.state_dict().values()
    weights = {local(tensor).data_ptr(): tensor.nbytes for tensor in tensors}  # tied ones are stored once
    copies = 1 if averaging.start_step is None else 2
    matrices = matrix_ids(model) - transition_parameter_ids(model) if optimizer.algorithm == "muon" else set()
    moments = (
        int(optimizer.options.get("momentum", 0.0) > 0) if optimizer.algorithm == "sgd" else 2
    )  # a guess for others
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer.algorithm == "soap":
        kept = sum(parameter.element_size() * kept_numbers(parameter) for parameter in trained)
    else:
        kept = sum(parameter.nbytes * (1 if id(parameter) in matrices else moments) for parameter in trained)
    return copies * sum(weights.values()) + kept


def space_note(folder: Path, n_bytes: int) -> str:
    """Warn if the disk of `folder` has too little room for checkpoints of this size; empty if it has enough."""
    try:
        free = free_bytes(folder)
    except OSError:
        return ""  # whether there is room will be seen
    if free >= ROOM_FOR * n_bytes:
        return ""
    return (
        f"note: a checkpoint of this run takes about {n_bytes:,} bytes, and {folder} has {free:,} bytes free; "
        f"make room for {ROOM_FOR} of them"
    )
