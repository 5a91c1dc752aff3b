"""Gated DeltaNet: the delta rule with a decay (Yang, Kautz and Hatamizadeh 2025, arXiv 2412.06464)."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import require_heads
from recurra.layers.norms import at_least_float32, gated
from recurra.layers.state_space import inverse_softplus_of_steps
from recurra.mixers.base import register_mixer
from recurra.mixers.delta_net import DeltaMixer, DeltaNetState

_SMALLEST_STEP, _LARGEST_STEP, _LARGEST_RATE = 0.001, 0.1, 16.0


@register_mixer("gated-delta-net")
class GatedDeltaNet(DeltaMixer):
    """y_t = (SiLU(W_g x_t) * norm(q_t h_t / sqrt(d_k))) W_o, h_t = a_t (I - b_t k_t^T k_t) h_{t-1} + b_t k_t^T v_t.

    q, k, v = SiLU(convolution(W x)), a causal filter of K steps per channel; then q and k have length 1 in each head
    (section 3.4). Each head has a learning rate b_t = sigmoid(W_b x_t) and a decay in Mamba 2's form,

        a_t = exp(-exp(A_log) softplus(W_a x_t + dt_bias)).

    Initially, exp(A_log) is uniform in (0, 16] and softplus(dt_bias) log-uniform in [0.001, 0.1], as in the published
    code. Our choices: as many value heads as key heads by default, and if six heads do not divide the published width,
    the number of channels per head is rounded down.

    Args:
        d_qk: channels of queries and keys over all heads; about 3/4 of `d_model`, as published, if None.
        d_v: channels of the values over all heads; twice `d_qk`, as published, if None.
        n_heads: heads; 6 as published.
        kernel_size: K, the steps that the convolution sees, the newest included.
        negative_eigenvalues: b_t = 2 sigmoid(W_b x_t). The transition's eigenvalue a_t (1 - b_t) along k_t can then be
            negative, and the layer can count modulo 2 (Grazzi et al. 2025, arXiv 2411.12537).
        n_qk_heads: heads of the queries and keys, each shared by n_heads / n_qk_heads heads of the values, as in
            Qwen3-Next; `n_heads` if None.
        norm_epsilon: added to the mean square in the norm.
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_qk: int | None = None,
        d_v: int | None = None,
        n_heads: int = 6,
        kernel_size: int = 4,
        negative_eigenvalues: bool = False,
        n_qk_heads: int | None = None,
        norm_epsilon: float = 1e-5,
    ) -> None:
        require_heads(n_heads)
        d_qk = n_heads * max(1, 3 * d_model // (4 * n_heads)) if d_qk is None else d_qk
        d_v = 2 * d_qk if d_v is None else d_v
        super().__init__(d_model, d_qk, d_v, n_heads, kernel_size, negative_eigenvalues, n_qk_heads, norm_epsilon)
        self.decay_projection = nn.Linear(d_model, n_heads, bias=False)
        self.A_log = nn.Parameter(torch.log(_LARGEST_RATE * (1 - torch.rand(n_heads))))  # never log(0)
        self.dt_bias = nn.Parameter(inverse_softplus_of_steps(n_heads, _SMALLEST_STEP, _LARGEST_STEP))
        self.gate_projection = nn.Linear(d_model, d_v, bias=False)

    def transition_parameters(self) -> set[nn.Parameter]:
        return {self.A_log, self.dt_bias, *self.decay_projection.parameters()}

    def transition(self, x: Float[Tensor, "B L d_model"]) -> tuple[Float[Tensor, "B L H2"], Float[Tensor, "B L H2"]]:
        """Return the decay a_t of every head and then its transition along the key, a_t (1 - b_t); the phase is pi
        where that is negative."""
        a = self._decay(x)
        both = torch.cat([a, a * (1 - self._rate(x))], -1)
        return both.abs(), math.pi * (both < 0)

    def _decay(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L H"]:
        step = functional.softplus(at_least_float32(self.decay_projection(x)) + at_least_float32(self.dt_bias))
        return torch.exp(-torch.exp(at_least_float32(self.A_log)) * step)

    def mix(self, x: Tensor, state: DeltaNetState, mask: Tensor | None) -> tuple[Tensor, DeltaNetState]:
        y, state = self.read(x, self._decay(x), state, mask)
        return self.output_projection(gated(y, self.gate_projection(x), self.norm)), state
