"""Sinusoids of distances: the position encoding R of relative attention."""

import torch
from jaxtyping import Float
from torch import Tensor


def sinusoids(
    n_distances: int, d_model: int, *, like: Tensor, clamp_len: int | None = None
) -> Float[Tensor, "n_distances d_model"]:
    """Encode the distances n_distances - 1, ..., 1, 0, one per row (Transformer-XL, arXiv 1901.02860, section 3.3).

    The row of distance d is sin(d f_0), ..., sin(d f_k), cos(d f_0), ..., cos(d f_k) with f_i = 10000^(-2i / d_model):
    all sines, then all cosines, as in Transformer-XL's code.

    Args:
        n_distances: number of rows.
        d_model: channels, an even number.
        like: a tensor of the device and dtype of the result.
        clamp_len: larger distances are encoded as this one; None for no limit.
    """
    # The frequencies are rounded to float32 in every precision, because the published weights were trained that way.
    exponents = torch.arange(0, d_model, 2, dtype=torch.float32, device=like.device) / d_model
    dtype = torch.promote_types(like.dtype, torch.float32)
    distances = torch.arange(n_distances - 1, -1, -1, dtype=dtype, device=like.device)
    if clamp_len is not None:
        distances = distances.clamp(max=clamp_len)
    angles = torch.outer(distances, (1.0 / 10000.0**exponents).to(dtype))
    return torch.cat([angles.sin(), angles.cos()], -1).to(like.dtype)
