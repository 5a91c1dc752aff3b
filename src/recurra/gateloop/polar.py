"""From magnitude and phase to the two planes of a complex transition (GateLoop (25))."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from recurra.gateloop.fused import Planes
from recurra.kernels.operator import transforms_are_active


class _PolarPlanes(torch.autograd.Function):
    """re = m cos(t), im = m sin(t); the backward pass reuses all four instead of computing sine and cosine again."""

    @staticmethod
    def forward(magnitude: Tensor, phase: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        cos, sin = phase.cos(), phase.sin()
        return magnitude * cos, magnitude * sin, cos, sin

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, d_re: Any, d_im: Any, d_cos: Any, d_sin: Any) -> tuple[Tensor, Tensor]:
        re, im, cos, sin = ctx.saved_tensors
        d_re, d_im = (torch.zeros_like(re) if d is None else d for d in (d_re, d_im))
        d_phase = torch.addcmul(d_im * re, d_re, im, value=-1)
        if d_cos is not None:  # only if this backward pass is differentiated again
            d_phase = d_phase - d_cos * sin
        if d_sin is not None:
            d_phase = d_phase + d_sin * cos
        return torch.addcmul(d_re * cos, d_im, sin), d_phase


def polar_planes(magnitude: Float[Tensor, "*shape"], phase: Float[Tensor, "*shape"]) -> Planes:
    """Return the planes of a = magnitude * exp(i phase) (GateLoop (25)); the phase is in radians."""
    if not torch.is_grad_enabled() or transforms_are_active():
        return Planes(magnitude * phase.cos(), magnitude * phase.sin())
    re, im, _, _ = _PolarPlanes.apply(magnitude, phase)
    return Planes(re, im)
