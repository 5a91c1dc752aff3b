"""How unlikely the targets are: what training, evaluation and scoring ask of every model that gives logits.

    losses, state = model.loss(inputs, targets, state)

stands beside `logits, state = model(inputs, state)` under the same contract. A model over a large vocabulary computes
it without the logits; `PlainLikelihood` is for those that have no shorter way.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional

from recurra.layers.vocabulary import IGNORED_TARGET, counted_targets, require_tokens
from recurra.lengths.padded import given_lengths


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
    """Gives a model `(inputs, state) -> (logits, state)` its `loss`, by way of the logits."""

    def loss(
        self,
        inputs: Shaped[Tensor, "B ..."],
        targets: Int[Tensor, "B L"],
        state: Any = None,
        *,
        mask: Bool[Tensor, "B L"] | None = None,
        cu_seqlens: Int[Tensor, " borders"] | None = None,
    ) -> tuple[Float[Tensor, "B L"], Any]:
        """Give the negative log-likelihood of every target in nats, going on from `state`.

        Args:
            inputs: what the model reads, L steps of it: tokens (B, L), say, or a clip (B, T, C, H, W) of L segments.
            targets: the class of every step, for a language model the token that should come after it;
                `IGNORED_TARGET` gives 0.
            state: what the steps before left; None is the start of a stream.
            mask, cu_seqlens: as the model takes them, where it does; what does not count has a loss of 0.

        Raises:
            IndexError: a token or a target is not in the vocabulary, or no class.
        """
        logits, state = self(inputs, state, **given_lengths(mask, cu_seqlens))
        return negative_log_likelihood(logits, counted_targets(targets, mask)), state
