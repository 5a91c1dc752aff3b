"""The precision in which recurrences run."""

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Convert float16 and bfloat16 to float32, in which recurrences run and states are kept; keep other dtypes."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
