"""The likelihood of targets under logits."""

from jaxtyping import Float, Int
from torch import Tensor

from recurra.layers.cross_entropy import cross_entropy
from recurra.layers.vocabulary import IGNORED_TARGET, require_tokens


def negative_log_likelihood(logits: Float[Tensor, "B L V"], targets: Int[Tensor, "B L"]) -> Float[Tensor, "B L"]:
    """Return -log softmax(logits)[target] in nats, in float32 or better; `IGNORED_TARGET` gives 0.

    Raises:
        IndexError: a target is not below V.
    """
    require_tokens("targets", targets.where(targets != IGNORED_TARGET, 0), logits.shape[-1])
    return cross_entropy(logits.flatten(0, 1), targets.flatten()).view_as(targets)
