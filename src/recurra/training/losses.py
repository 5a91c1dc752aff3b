"""What training minimises: cross-entropy, or its generalised form; penalties; and logits only where targets count.

The penalties, on large activations and on fast changes of them, are of AWD-LSTM (Merity et al., "Regularizing and
optimizing LSTM language models", 2017), where they are called AR and TAR. The generalised cross-entropy is of Zhang and
Sabuncu, "Generalized cross entropy loss for training deep neural networks with noisy labels" (arXiv 1805.07836).
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from recurra.data import IGNORED_TARGET
from recurra.training.config import TrainingConfig

FEW = 4
"""Targets are few if they stand at no more than a fourth of the positions. Then logits are formed only there: with
8,192 words and answers at 1 of 16 tokens, the others would take most of an update."""


def few_targets(n_targets: int, targets: Int[Tensor, "B L"]) -> bool:
    """Say whether the `n_targets` of these that count are few."""
    return FEW * n_targets <= targets.numel()


def loss_by_parts(
    model: Any,
    inputs: Int[Tensor, "B L"],
    targets: Int[Tensor, "B L"],
    state: Any,
    config: TrainingConfig,
) -> tuple[Float[Tensor, "1 N"], Tensor | float, Any]:
    """Return the losses of the N targets that count, the penalty to add to the mean loss, and the next state.

    `model` is a `recurra.models.shell.LanguageModelShell`, as it is or set up by Fabric.

    The penalty is `activation_penalty` times the mean square of what the head reads, dropout included, and
    `change_penalty` times the mean square of its change from one step to the next.
    """
    hidden, state = model.hidden(inputs, state)
    counted = targets != IGNORED_TARGET
    return model.losses(hidden[counted][None], targets[counted][None]), _penalty(hidden, config), state


def to_minimise(
    losses: Float[Tensor, "B L"], n_targets: int, penalty: Tensor | float, config: TrainingConfig
) -> Float[Tensor, ""]:
    """Return the sum to minimise over a batch of `losses` -log p, with the penalty on its mean.

    With `generalised_cross_entropy` q it sums (1 - p^q) / q, whose gradient is that of -log p times p^q (Zhang and
    Sabuncu, section 3.3). A loss of 0, as of targets that do not count, stays 0.
    """
    q = config.generalised_cross_entropy
    summed = (-torch.expm1(-q * losses) / q if q else losses).sum()
    return summed + n_targets * penalty


def _penalty(hidden: Float[Tensor, "B L d_model"], config: TrainingConfig) -> Tensor | float:
    penalty: Tensor | float = 0.0
    wide = hidden.float()
    if config.activation_penalty:
        penalty = penalty + config.activation_penalty * wide.square().mean()
    if config.change_penalty and wide.shape[1] > 1:
        penalty = penalty + config.change_penalty * wide.diff(dim=1).square().mean()
    return penalty
