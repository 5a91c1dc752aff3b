"""Vectors of length 1, which queries and keys of the delta rule are."""

import torch
from jaxtyping import Float
from torch import Tensor

from recurra.layers.precision import at_least_float32

_EPSILON = 1e-6  # as in the published code; a vector of zeros stays zeros, with a finite gradient


def unit_length(x: Float[Tensor, "*shape channels"]) -> Float[Tensor, "*shape channels"]:
    """Divide by the Euclidean length over the last dimension, in float32 or better."""
    x = at_least_float32(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON)
