"""Performer: softmax attention by positive orthogonal random features (Choromanski et al., arXiv 2009.14794)."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import require_at_least, require_heads
from recurra.layers.features import LOWEST, positive_features
from recurra.layers.norms import at_least_float32
from recurra.mixers.base import Mixer, StateSpec, register_mixer
from recurra.ops._operator import without_autocast
from recurra.ops.gate_loop.operator import gate_loop


class PerformerState(NamedTuple):
    """h_n,r = sum_{m<=n} exp(e_m,r - peak_n,r) [v_m, 1].

    e_m,r is the exponent of feature r of the key k_m, and peak_n,r = max_{m<=n} e_m,r, or 0 before the first step. The
    last column of h is the normaliser.
    """

    h: Float[Tensor, "B H m columns"]
    peak: Float[Tensor, "B H m"]


@register_mixer("performer")
class Performer(Mixer):
    """FAVOR+: y_n = W_o (phi(q_n) sum_m phi(k_m)^T v_m / phi(q_n) sum_m phi(k_m)), m <= n, per head, with

        phi(x)_r = exp(w_r x' - |x'|^2 / 2) / sqrt(n_features),  x' = x / d_head^(1/4)  (Lemma 1)

    and q, k, v = linear projections of x. This is the paper's formula: the authors' code (performer/fast_attention of
    github.com/google-research/google-research) adds an epsilon to every feature, and outputs differ by it.

    phi(q) . phi(k) is an unbiased estimate of exp(q . k / sqrt(d_head)). The w_r have the lengths of Gaussian vectors,
    and within blocks of d_head they are orthogonal (section 2.4). They are drawn once, for all heads, and saved with
    the weights.

    Features are exponentials and can overflow. The published code divides by the largest key feature of the sequence,
    so a step depends on later steps. Here, the state has a running maximum of each feature's exponents. When it rises,
    the sums are scaled down. Each term of the sums is at most 1 and the normaliser at least 1, so no epsilon
    is needed. The factor cancels and counts as a constant. A query's factor exp(-|q'|^2 / 2) cancels too.

    Args:
        n_heads: heads; they divide d_model.
        n_features: features per head; d_head ln d_head, as published, if None.
    """

    skips_padding = True
    features: Tensor

    def __init__(self, d_model: int, *, n_heads: int = 4, n_features: int | None = None) -> None:
        require_heads(n_heads, d_model=d_model)
        d_head = d_model // n_heads
        n_features = max(1, round(d_head * math.log(d_head))) if n_features is None else n_features
        require_at_least(1, n_features=n_features)
        h = StateSpec((n_heads, n_features, d_head + 1))
        super().__init__(d_model, PerformerState, h=h, peak=StateSpec((n_heads, n_features)))
        self.n_heads, self.d_head = n_heads, d_head
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.register_buffer("features", _orthogonal_features(n_features, d_head))
        self.output_projection = nn.Linear(d_model, d_model)

    def mix(self, x: Tensor, state: PerformerState, mask: Tensor | None) -> tuple[Tensor, PerformerState]:
        q, k, v = (at_least_float32(p).unflatten(-1, (self.n_heads, -1)) for p in self.qkv(x).chunk(3, -1))
        with without_autocast(x):  # exponents in bfloat16 would be off by whole factors
            start = torch.where(state.h[..., -1] > 0, state.peak, LOWEST).detach()
            q, k, rows = q * self.d_head**-0.25, k * self.d_head**-0.25, at_least_float32(self.features).T
            queries, keys, decay, peak = positive_features(q @ rows, k @ rows, k.square().sum(-1) / 2, start, mask)
            y, h = gate_loop(queries, keys, functional.pad(v, (0, 1), value=1.0), decay, state=state.h)
        y = y[..., :-1] / y[..., -1:].clamp(min=0.5)  # below 1 only at padding before the first step
        if mask is not None:
            peak = torch.where(mask.any(1)[:, None, None], peak, state.peak)
        return self.output_projection(y.flatten(-2).to(x.dtype)), PerformerState(h, peak)


def _orthogonal_features(n_features: int, d_head: int) -> Float[Tensor, "n_features d_head"]:
    """Draw Gaussian vectors that are orthogonal within each block of d_head (section 2.4)."""
    n_blocks = -(-n_features // d_head)
    directions, upper = torch.linalg.qr(torch.randn(n_blocks, d_head, d_head, dtype=torch.float64))
    directions = directions * upper.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # without it, not uniform
    lengths = torch.randn(n_features, d_head, dtype=torch.float64).norm(dim=1)
    rows = directions.transpose(-1, -2).flatten(0, 1)[:n_features] * lengths[:, None]
    return rows.to(torch.get_default_dtype())
