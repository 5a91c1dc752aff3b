"""What training minimises: cross-entropy, or its generalised form; penalties; and logits only where targets count.

The penalties, on large activations and on fast changes of them, are of AWD-LSTM (Merity et al., "Regularizing and
optimizing LSTM language models", 2017), where they are called AR and TAR. The generalised cross-entropy is of Zhang and
Sabuncu, "Generalized cross entropy loss for training deep neural networks with noisy labels" (arXiv 1805.07836).
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from recurra.checks import sentence
from recurra.data import IGNORED_TARGET
from recurra.layers.vocabulary import few_targets
from recurra.models import LanguageModel
from recurra.models.shell import LanguageModelShell
from recurra.training.config import TrainingConfig
from recurra.training.sequence_parallel import Pieces, in_pieces


class Objective(nn.Module):
    """A model as training calls it: inputs and targets in, what to minimise out.

    One call of forward, so that DDP, FSDP and Fabric's precision see one module like any other.

    Args:
        model: the model in training.
        config: the penalties, and the form of the loss.
        pieces: the ranks that share a sequence, each of which computes a piece of it; None for whole sequences.

    Raises:
        ValueError: `config` has penalties, and the model is no language model; or FSDP and ranks that share sequences,
            and the model is one whose ranks take turns.
    """

    def __init__(self, model: nn.Module, config: TrainingConfig, pieces: Pieces | None = None) -> None:
        super().__init__()
        self.model, self.config, self.pieces = model, config, pieces
        self._has_parts = isinstance(model, LanguageModelShell)
        if config.has_penalties and not self._has_parts:
            given, kind = (config.activation_penalty, config.change_penalty), type(model).__name__
            names, came = "training.activation_penalty and .change_penalty", f"{given[0]} and {given[1]}, for a {kind}"
            raise ValueError(sentence(names, came, "0 but for a language model"))
        if config.sequence_parallel > 1 and config.strategy == "fsdp" and not isinstance(model, LanguageModel):
            expected = "ddp with training.sequence_parallel for a model that reads segments"
            mend = "its ranks take turns, and FSDP needs all of them at once"
            raise ValueError(sentence("training.strategy", "fsdp", expected, mend))

    def forward(
        self, inputs: Tensor, targets: Tensor, n_targets: int, state: Any, **extra: Any
    ) -> tuple[Tensor, Tensor, Any]:
        """Return the summed loss in nats, the sum to minimise and the next state.

        Args:
            inputs, targets: of a batch.
            n_targets: how many targets count.
            state: what the batch continues from; None for the start of streams.
            extra: what else the model's loss takes.
        """
        if self.pieces is None:
            return self._piece(inputs, targets, n_targets, state, **extra)
        kept = []

        def whole_piece(entering: Any) -> tuple[Tensor, Any]:
            loss, objective, leaving = self._piece(inputs, targets, n_targets, entering, **extra)
            kept.append(loss)
            return objective, leaving

        objective, state = in_pieces(self.model, whole_piece, state, self.pieces)
        return kept[0], objective, state

    def _piece(
        self, inputs: Tensor, targets: Tensor, n_targets: int, state: Any, **extra: Any
    ) -> tuple[Tensor, Tensor, Any]:
        penalty: Tensor | float = 0.0
        if self._has_parts:
            few = few_targets(n_targets, targets)
            losses, penalty, state = loss_by_parts(self.model, inputs, targets, state, self.config, few=few, **extra)
        else:
            losses, state = self.model.loss(inputs, targets, state, **extra)  # type: ignore[operator]
        return losses.sum(), to_minimise(losses, n_targets, penalty, self.config), state


def loss_by_parts(
    model: Any,
    inputs: Int[Tensor, "B L"],
    targets: Int[Tensor, "B L"],
    state: Any,
    config: TrainingConfig,
    *,
    few: bool = False,
    **lengths: Any,
) -> tuple[Float[Tensor, "rows N"], Tensor | float, Any]:
    """Return the losses of all targets, or where they are few of the N that count; the penalty; and the next state.

    `model` is a `recurra.models.shell.LanguageModelShell`; `lengths` are the borders of packed sequences, if any.
    `few` or not, the same methods of it are called: FSDP gathers its parameters at each call, on all ranks together,
    some of which may have few targets.

    The penalty, which is added to the mean loss, is `activation_penalty` times the mean square of what the head reads,
    dropout included, and `change_penalty` times the mean square of its change from one step of a sequence to the next.
    """
    hidden, state = model.hidden(inputs, state, **lengths)
    penalty = _penalty(hidden, config, **lengths)
    if few:
        counted = targets != IGNORED_TARGET
        hidden, targets = hidden[counted][None], targets[counted][None]
    return model.losses(hidden, targets), penalty, state


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


def _penalty(
    hidden: Float[Tensor, "B L d_model"], config: TrainingConfig, cu_seqlens: Tensor | None = None
) -> Tensor | float:
    penalty: Tensor | float = 0.0
    wide = hidden.float()
    if config.activation_penalty:
        penalty = penalty + config.activation_penalty * wide.square().mean()
    if config.change_penalty and wide.shape[1] > 1:
        changes = wide.diff(dim=1).square()
        if cu_seqlens is not None:
            within = torch.ones(wide.shape[1] + 1, dtype=torch.bool, device=changes.device)
            within[cu_seqlens.to(changes.device)] = False  # from one sequence to the next
            changes = changes[:, within[1:-1]]
        if changes.numel():
            penalty = penalty + config.change_penalty * changes.mean()
    return penalty
