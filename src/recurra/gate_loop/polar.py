"""From magnitude and phase to the two planes of a complex gate (GateLoop eq. (25))."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from recurra.gate_loop.fused import Planes


class _PolarPlanes(torch.autograd.Function):
    """re = m cos(t), im = m sin(t); the backward pass reuses all four instead of computing sine and cosine again."""

    @staticmethod
    def forward(magnitude: Tensor, phase: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        cos, sin = phase.cos(), phase.sin()
        return magnitude * cos, magnitude * sin, cos, sin

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*output)
        ctx.mark_non_differentiable(*output[2:])

    @staticmethod
    def backward(ctx: Any, d_re: Tensor, d_im: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        re, im, cos, sin = ctx.saved_tensors
        return torch.addcmul(d_re * cos, d_im, sin), torch.addcmul(d_im * re, d_re, im, value=-1)


def polar_planes(magnitude: Float[Tensor, "*shape"], phase: Float[Tensor, "*shape"]) -> Planes:
    """Give the planes of a = magnitude * exp(i phase); the phase is in radians."""
    re, im, _, _ = _PolarPlanes.apply(magnitude, phase)
    return Planes(re, im)
