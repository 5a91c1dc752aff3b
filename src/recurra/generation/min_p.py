"""Min-p: draw among the tokens that are not much less likely than the likeliest (Nguyen et al., arXiv 2407.01082)."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from recurra.layers.precision import at_least_float32


def keep_min_p(logits: Float[Tensor, "*batch V"], p: float) -> Float[Tensor, "*batch V"]:
    """Set the logits of tokens less than p times as likely as the likeliest to -inf, in float32 or better.

    Raises:
        ValueError: p is not in (0, 1].
    """
    if not 0 < p <= 1:
        raise ValueError(f"p is {p}; expected a share above 0 and up to 1")
    logits = at_least_float32(logits)
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(p), -torch.inf)
