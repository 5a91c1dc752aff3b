"""Rotation of queries and keys by their positions: the phases of xPos (arXiv 2212.10554, section 2) and RoPE."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def phases(positions: Int[Tensor, "*n"], n_channels: int) -> Float[Tensor, "*n pairs"]:
    """Give theta_i n in radians and in float64, with theta_i = 10000^(-2i / n_channels) for pair i of the channels.

    In float32 the phase of position 10^6 would be off by up to 0.06 radians.

    Args:
        positions: n, of any sign.
        n_channels: an even number of channels, which are rotated two by two.
    """
    exponents = torch.arange(0, n_channels, 2, dtype=torch.float64, device=positions.device) / n_channels
    return positions.double()[..., None] * 10000.0**-exponents


def rotate(x: Float[Tensor, "*batch d"], angles: Float[Tensor, "*#batch pairs"]) -> Float[Tensor, "*batch d"]:
    """Multiply x, with channels 2i and 2i + 1 as the complex number x_2i + i x_2i+1, by exp(i angle).

    A product of two such rows then depends on the difference of their angles only:
    rotate(q, n theta) . rotate(k, m theta) = Re(q conj(k) exp(i (n - m) theta)).
    """
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    re, im = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([re * cos - im * sin, re * sin + im * cos], -1).flatten(-2)
