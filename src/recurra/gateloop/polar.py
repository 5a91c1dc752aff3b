"""From magnitude and phase to the two planes of a complex transition (GateLoop (25))."""

import torch
from jaxtyping import Float
from torch import Tensor

from recurra.gateloop.fused import Planes
from recurra.kernels.operator import Differentiable


def polar_planes(magnitude: Float[Tensor, "*shape"], phase: Float[Tensor, "*shape"]) -> Planes:
    """Return the planes of a = magnitude * exp(i phase) (GateLoop (25)); the phase is in radians."""
    re, im, *_ = _polar_planes(magnitude, phase)
    return Planes(re, im)


def _forward(keep: bool, magnitude: Tensor, phase: Tensor) -> tuple[tuple, tuple]:
    cos, sin = phase.cos(), phase.sin()
    results = magnitude * cos, magnitude * sin, cos, sin
    return results, results


def _backward(gradients: tuple, saved: tuple, needs: object = None) -> tuple[Tensor, Tensor]:
    """Reuse all four results, instead of computing sine and cosine again."""
    (d_re, d_im, d_cos, d_sin), (re, im, cos, sin) = gradients, saved
    d_re, d_im = (torch.zeros_like(re) if d is None else d for d in (d_re, d_im))
    d_phase = torch.addcmul(d_im * re, d_re, im, value=-1)
    if d_cos is not None:  # only if this backward pass is differentiated again
        d_phase = d_phase - d_cos * sin
    if d_sin is not None:
        d_phase = d_phase + d_sin * cos
    return torch.addcmul(d_re * cos, d_im, sin), d_phase


_polar_planes = Differentiable(
    _forward,
    _backward,
    n_inputs=2,
    reference=lambda magnitude, phase: (magnitude * phase.cos(), magnitude * phase.sin()),
    again=_backward,
)
