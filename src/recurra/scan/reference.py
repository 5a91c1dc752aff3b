"""The linear recurrence in plain torch: on any device, of any dtype, differentiable any number of times."""

import torch
from jaxtyping import Shaped
from torch import Tensor


def linear_scan_reference(
    a: Shaped[Tensor, "B L D"], b: Shaped[Tensor, "B L D"], h0: Shaped[Tensor, "B D"], reverse: bool
) -> Shaped[Tensor, "B L D"]:
    """Compute h_t = a_t h_{t-1} + b_t step by step, as it is written."""
    h, states = h0, []
    for t in reversed(range(b.shape[1])) if reverse else range(b.shape[1]):
        h = a[:, t] * h + b[:, t]
        states.append(h)
    return torch.stack(states[::-1] if reverse else states, dim=1)
