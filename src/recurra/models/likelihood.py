"""How unlikely the targets are: what training, evaluation and scoring ask of every language model.

    losses, state = model.loss(tokens, targets, state)

stands beside `logits, state = model(tokens, state)` under the same contract. A model over a large vocabulary computes
it without the logits; `PlainLikelihood` is for those that have no shorter way.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from recurra.layers.vocabulary import IGNORED_TARGET, require_tokens


def negative_log_likelihood(logits: Float[Tensor, "B L V"], targets: Int[Tensor, "B L"]) -> Float[Tensor, "B L"]:
    """Give -log softmax(logits)[target] in nats, in float32 or better; `IGNORED_TARGET` gives 0.

    Raises:
        IndexError: a target is not below V.
    """
    require_tokens("targets", targets.where(targets != IGNORED_TARGET, 0), logits.shape[-1])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="none"
    )
    return losses.view_as(targets)


class PlainLikelihood(nn.Module):
    """Gives a model `(tokens, state) -> (logits, state)` its `loss`, by way of the logits."""

    def loss(
        self, tokens: Int[Tensor, "B L"], targets: Int[Tensor, "B L"], state: Any = None
    ) -> tuple[Float[Tensor, "B L"], Any]:
        """Give the negative log-likelihood of every target in nats, going on from `state`.

        Args:
            tokens: what the model reads.
            targets: what should come after each; `IGNORED_TARGET` gives 0.
            state: what the steps before left; None is the start of a stream.

        Raises:
            IndexError: a token or a target is not in the vocabulary.
        """
        logits, state = self(tokens, state)
        return negative_log_likelihood(logits, targets), state
