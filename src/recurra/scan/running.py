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


def stabilisers(
    sums: Float[Tensor, "#B L *rest"], log_i: Float[Tensor, "B L *rest"], m: Float[Tensor, "B *rest"]
) -> Float[Tensor, "B L *rest"]:
    """m_t = max(log f_t + m_{t-1}, log i_t) for all steps (Beck et al. (15)), by running sums of log f and maxima.

    Differences of running sums lose digits over many steps. That is harmless: numbers near these stabilise as well, if
    the whole recurrence uses the same ones.
    """
    return sums + torch.maximum(running_maximum(log_i - sums), m[:, None])
