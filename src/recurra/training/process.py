"""The process of a run: threads, determinism, device, precision, and the ranks beside it."""

import logging
import os
from typing import TYPE_CHECKING

import torch

from recurra.checks import sentence
from recurra.training.config import TrainingConfig
from recurra.training.precision import known_precision
from recurra.training.ranks import n_launched
from recurra.training.strategy import fabric_options

if TYPE_CHECKING:
    import lightning_fabric


def set_up_process(config: TrainingConfig) -> "lightning_fabric.Fabric":
    """Set up this process as `config` says, including its seeds, and return the Fabric that places and runs the model.

    Args:
        config: `settled`.

    Raises:
        ValueError: `config` asks for CUDA by name and PyTorch finds no CUDA device.
    """
    # Takes a second or two to import; reading a run, scoring it and generating text do without it.
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
    """Replace what `config` leaves to this machine and a run has to keep: `precision: auto`.

    Raises:
        ValueError: `config` asks for CUDA by name and PyTorch finds no CUDA device.
    """
    return known_precision(config, chosen_device(config.accelerator))


def chosen_device(wanted: str, name: str = "training.accelerator") -> str:
    """Turn "auto", "cpu" or "cuda" into what there is; `name` is that of the option.

    Raises:
        ValueError: CUDA is asked for by name and PyTorch finds no CUDA device.
    """
    # Fabric's "auto" would also choose devices without float64 and complex numbers, such as Apple's.
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        came = "cuda, and PyTorch finds no CUDA device"
        raise ValueError(sentence(name, came, "cpu or auto on this machine"))
    return wanted
