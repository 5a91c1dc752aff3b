"""Top-p, nucleus sampling: draw among the likeliest tokens that hold a share p of the probability (Holtzman et al.,
arXiv 1904.09751, section 3.1)."""

import torch
from jaxtyping import Float
from torch import Tensor

from recurra.layers.precision import at_least_float32


def keep_top_p(logits: Float[Tensor, "*batch V"], p: float) -> Float[Tensor, "*batch V"]:
    """Set all logits to -inf but those of the fewest likeliest tokens whose probabilities sum to p or more.

    The likeliest token always stays; so do those that equal the last one kept. Logits in float32 or better, the sums in
    float64. With a p of 1 everything stays.

    Raises:
        ValueError: p is not in (0, 1].
    """
    if not 0 < p <= 1:
        raise ValueError(f"p is {p}; expected a share above 0 and up to 1")
    logits = at_least_float32(logits)
    if p == 1:
        return logits  # a sum that is rounded up to 1 early must not cut off the rest
    falling = logits.sort(-1, descending=True).values
    reached = falling.softmax(-1, dtype=torch.float64).cumsum(-1)
    n_kept = 1 + (reached[..., :-1] < p).sum(-1, keepdim=True)
    return logits.masked_fill(logits < falling.gather(-1, n_kept - 1), -torch.inf)
