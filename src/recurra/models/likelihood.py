"""The likelihood of targets under logits."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from recurra.layers.vocabulary import IGNORED_TARGET, require_tokens


def negative_log_likelihood(logits: Float[Tensor, "B L V"], targets: Int[Tensor, "B L"]) -> Float[Tensor, "B L"]:
    """Return -log softmax(logits)[target] in nats, in float32 or better; `IGNORED_TARGET` gives 0.

    Raises:
        IndexError: a target is not below V.
    """
    require_tokens("targets", targets.where(targets != IGNORED_TARGET, 0), logits.shape[-1])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="none"
    )
    return losses.view_as(targets)
