"""From logits to a token: the likeliest, or one drawn by its probability."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from recurra.layers.precision import at_least_float32


def greedy(logits: Float[Tensor, "*batch V"]) -> Int[Tensor, "*batch"]:
    """Give the likeliest token, the first where several are equal.

    Raises:
        ValueError: the logits hold NaN or +inf, or all of a row are -inf.
    """
    _require_a_distribution(logits)
    return logits.argmax(-1)


def draw(logits: Float[Tensor, "*batch V"], generator: torch.Generator) -> Int[Tensor, "*batch"]:
    """Draw a token by its probability softmax(logits), in float32 or better; a logit of -inf is never drawn.

    Args:
        logits: of any batch.
        generator: the only source of chance, on the logits' device: equal logits and an equally seeded generator give
            equal tokens.

    Raises:
        ValueError: the logits hold NaN or +inf, or all of a row are -inf.
    """
    _require_a_distribution(logits)
    probabilities = at_least_float32(logits).softmax(-1)
    return probabilities.view(-1, logits.shape[-1]).multinomial(1, generator=generator).view(logits.shape[:-1])


def _require_a_distribution(logits: Tensor) -> None:
    largest = logits.amax(-1)  # NaN where one is NaN
    if not bool(largest.isfinite().all()):
        raise ValueError(
            f"the largest logits of the rows are {largest.flatten()[:8].tolist()}; expected finite ones: with NaN or "
            "+inf, or where every token is ruled out (-inf), there is nothing to choose"
        )
