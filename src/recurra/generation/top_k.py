"""Top-k: draw among the k likeliest tokens (Fan et al., arXiv 1805.04833, section 5.4)."""

import torch
from jaxtyping import Float
from torch import Tensor

from recurra.layers.precision import at_least_float32


def keep_top_k(logits: Float[Tensor, "*batch V"], k: int) -> Float[Tensor, "*batch V"]:
    """Set all but the k largest logits to -inf, in float32 or better.

    Those that equal the k-th largest stay too, so that the order of the vocabulary decides nothing. A k of V or more
    leaves everything.

    Raises:
        ValueError: k is below 1.
    """
    if k < 1:
        raise ValueError(f"k is {k}; expected at least 1")
    logits = at_least_float32(logits)
    smallest = logits.topk(min(k, logits.shape[-1]), -1).values[..., -1:]
    return logits.masked_fill(logits < smallest, -torch.inf)
