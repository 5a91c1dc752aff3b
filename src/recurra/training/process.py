"""The process that a run computes in: threads, determinism, device, precision."""

import os

import torch
from lightning_fabric import Fabric
from lightning_fabric.utilities.seed import seed_everything

from recurra.training.config import TrainingConfig


def set_up_process(config: TrainingConfig) -> Fabric:
    """Set up this process as `config` asks for, seeds included, and return what places and runs the model.

    Raises:
        ValueError: CUDA is asked for by name and PyTorch finds none.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.deterministic:
        # cuBLAS reads this when it starts; without it deterministic mode raises on a GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic)
    seed_everything(config.seed, verbose=False)
    return Fabric(accelerator=_accelerator(config.accelerator), devices=1, precision=config.precision)


def _accelerator(wanted: str) -> str:
    # Fabric's own "auto" would also take devices that lack float64 and complex numbers, such as Apple's.
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("training.accelerator is cuda, but PyTorch finds no CUDA device; use cpu or auto")
    return wanted
