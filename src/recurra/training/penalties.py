"""Penalties on what a language model's head reads: on large activations, and on fast changes of them.

Both are of AWD-LSTM (Merity et al., "Regularizing and optimizing LSTM language models", 2017), where they are called AR
and TAR.
"""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from recurra.training.config import TrainingConfig


def penalised_loss(
    model: Any,
    inputs: Int[Tensor, "B L"],
    targets: Int[Tensor, "B L"],
    state: Any,
    config: TrainingConfig,
) -> tuple[Float[Tensor, "B L"], Float[Tensor, ""], Any]:
    """Return what `model.loss` does, and the penalty to add to the mean loss, between them.

    `model` is a `recurra.models.shell.LanguageModelShell`, as it is or set up by Fabric.

    The penalty is `activation_penalty` times the mean square of what the head reads, dropout included, and
    `change_penalty` times the mean square of its change from one step to the next.
    """
    hidden, state = model.hidden(inputs, state)
    wide = hidden.float()
    penalty = config.activation_penalty * wide.square().mean()
    if config.change_penalty and wide.shape[1] > 1:
        penalty = penalty + config.change_penalty * wide.diff(dim=1).square().mean()
    return model.losses(hidden, targets), penalty, state
