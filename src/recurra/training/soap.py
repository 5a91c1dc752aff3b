"""SOAP: Adam in the eigenvectors of Shampoo's statistics, from the package pytorch-optimizer."""

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from recurra.checks import sentence

LARGEST_SIDE = 1024
"""A side of a matrix with more rows or columns than this, such as a vocabulary, keeps its own basis."""


def soap(
    groups: Iterable[dict[str, Any]],
    *,
    lr: float = 3e-3,
    betas: tuple[float, float] = (0.95, 0.95),
    eps: float = 1e-8,
    precondition_frequency: int = 5,
) -> Optimizer:
    """Make SOAP (Vyas et al., "SOAP: improving and stabilizing Shampoo using Adam", 2024) over parameter groups.

    Each matrix of gradients G adds to averages of G G^T and G^T G. Adam works in the basis of their eigenvectors, where
    the entries of a gradient hardly depend on each other. Vectors get plain Adam. The first update only begins the
    averages.

    Args:
        groups: parameter groups, each with its own `weight_decay`.
        lr: learning rate of groups without their own.
        betas: decay rates of the first and the second moment, the latter also that of the averages above.
        eps: the term in the denominator.
        precondition_frequency: how many updates it takes until the basis is brought nearer to the eigenvectors.

    Raises:
        ValueError: a parameter is complex, or sharded over ranks.
        ModuleNotFoundError: the package is missing.
    """
    from pytorch_optimizer import SOAP

    groups = list(groups)
    for parameter in (parameter for group in groups for parameter in group["params"]):
        if parameter.is_complex():
            came = f"a parameter of {parameter.dtype} and shape {tuple(parameter.shape)}"
            raise ValueError(sentence("optimizer.algorithm soap", came, "real parameters"))
        if hasattr(parameter, "device_mesh"):  # its statistics need whole gradients
            raise ValueError(sentence("training.strategy", "fsdp", "ddp with optimizer.algorithm soap"))
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0}
    return SOAP(groups, precondition_frequency=precondition_frequency, max_precondition_dim=LARGEST_SIDE, **options)
