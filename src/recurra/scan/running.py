"""Running maxima over time, for the stabilisers of exponentials."""

import torch
from jaxtyping import Float
from torch import Tensor


def running_maximum(x: Float[Tensor, "B L *rest"]) -> Float[Tensor, "B L *rest"]:
    """Return the largest of the numbers up to each step; a single step is returned as it is.

    >>> running_maximum(torch.tensor([[3.0, 1.0, 7.0, 0.0]]))
    tensor([[3., 3., 7., 7.]])
    """
    is_one_step = not isinstance(x.shape[1], torch.SymInt) and x.shape[1] == 1
    return x if is_one_step else x.cummax(1).values
