"""Rotation of queries and keys by their positions, as in RoPE and xPos (arXiv 2212.10554, section 2)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def phases(positions: Int[Tensor, "*n"], n_channels: int) -> Float[Tensor, "*n pairs"]:
    """Compute theta_i n in radians and float64, with theta_i = 10000^(-2i / n_channels) for channel pair i.

    In float32 the phase at position 10^6 would be off by up to 0.06 radians.

    Args:
        positions: n, of any sign.
        n_channels: number of channels, even: they are rotated in pairs.
    """
    exponents = torch.arange(0, n_channels, 2, dtype=torch.float64, device=positions.device) / n_channels
    return positions.double()[..., None] * 10000.0**-exponents


def rotate(x: Float[Tensor, "*batch d"], angles: Float[Tensor, "*#batch pairs"]) -> Float[Tensor, "*batch d"]:
    """Multiply x by exp(i angle), with channels 2i and 2i + 1 as the complex number x_2i + i x_2i+1.

    The product of two rotated vectors then depends only on the difference of their angles:
    rotate(q, n theta) . rotate(k, m theta) = Re(q conj(k) exp(i (n - m) theta)).
    """
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    re, im = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([re * cos - im * sin, re * sin + im * cos], -1).flatten(-2)
