"""Kimi Delta Attention: the delta rule with a decay per key channel (Kimi Team 2025, arXiv 2510.26692)."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import require_heads
from recurra.layers.norms import at_least_float32
from recurra.layers.state_space import inverse_softplus_of_steps
from recurra.mixers.base import register_mixer
from recurra.mixers.delta_net import DeltaMixer, DeltaNetState

_SMALLEST_STEP, _LARGEST_STEP, _SMALLEST_RATE, _LARGEST_RATE = 0.001, 0.1, 1.0, 16.0


@register_mixer("kda")
class KimiDeltaAttention(DeltaMixer):
    """y_t = (sigmoid(W_g x_t) * norm(q_t h_t / sqrt(d_k))) W_o with a delta rule,

        h_t = (I - b_t k_t^T k_t) diag(a_t) h_{t-1} + b_t k_t^T v_t.

    q, k, v = SiLU(convolution(W x)), a causal filter of K steps per channel; then q and k have length 1 in each head.
    b_t = sigmoid(W_b x_t) is one number per head. There is one decay per key channel, with one rate per head:

        a_t = exp(-exp(A_log) softplus(W_a x_t + dt_bias)).

    W_a and W_g are products of two matrices, with the rank of a head's values. The norm is a root mean square norm of
    each head, with one scale for all heads; only the decay has a bias (section 3). fla's layer adds one to W_g.
    Initially, exp(A_log) is uniform in [1, 16) and softplus(dt_bias) log-uniform in [0.001, 0.1], as in fla's models.

    Args:
        d_qk: channels of queries, keys and decays over all heads; `d_model` if None.
        d_v: channels of the values over all heads; `d_qk`, as published, if None.
        n_heads: heads; published models have d_qk / 128.
        kernel_size: K, the steps that the convolution sees, the newest included.
        negative_eigenvalues: b_t = 2 sigmoid(W_b x_t). The transition can then have a negative eigenvalue, and the
            layer can count modulo 2 (Grazzi et al. 2025, arXiv 2411.12537).
        norm_epsilon: added to the mean square in the norm.
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_qk: int | None = None,
        d_v: int | None = None,
        n_heads: int = 4,
        kernel_size: int = 4,
        negative_eigenvalues: bool = False,
        norm_epsilon: float = 1e-5,
    ) -> None:
        require_heads(n_heads)
        d_qk = d_model if d_qk is None else d_qk
        d_v = d_qk if d_v is None else d_v
        super().__init__(d_model, d_qk, d_v, n_heads, kernel_size, negative_eigenvalues, norm_epsilon=norm_epsilon)
        rank = d_v // n_heads
        self.decay_projection = nn.Sequential(nn.Linear(d_model, rank, bias=False), nn.Linear(rank, d_qk, bias=False))
        rates = _SMALLEST_RATE + (_LARGEST_RATE - _SMALLEST_RATE) * torch.rand(n_heads)
        self.A_log = nn.Parameter(torch.log(rates))
        self.dt_bias = nn.Parameter(inverse_softplus_of_steps(d_qk, _SMALLEST_STEP, _LARGEST_STEP))
        self.gate_projection = nn.Sequential(nn.Linear(d_model, rank, bias=False), nn.Linear(rank, d_v, bias=False))

    def transition_parameters(self) -> set[nn.Parameter]:
        return {self.A_log, self.dt_bias, *self.decay_projection.parameters()}

    def transition(
        self, x: Float[Tensor, "B L d_model"]
    ) -> tuple[Float[Tensor, "B L d_qk"], Float[Tensor, "B L d_qk"]]:
        """Return the decay a_t of every key channel and its phase, which is 0."""
        a = self._decay(x).flatten(-2)
        return a, torch.zeros_like(a)

    def _decay(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L H d_k"]:
        step = functional.softplus(at_least_float32(self.decay_projection(x)) + at_least_float32(self.dt_bias))
        rate = torch.exp(at_least_float32(self.A_log))[:, None]
        return torch.exp(-rate * step.unflatten(-1, (self.n_heads, -1)))

    def mix(self, x: Tensor, state: DeltaNetState, mask: Tensor | None) -> tuple[Tensor, DeltaNetState]:
        y, state = self.read(x, self._decay(x), state, mask)
        gate = torch.sigmoid(at_least_float32(self.gate_projection(x)))
        y = gate * self.norm(y.unflatten(-1, (self.n_heads, -1))).flatten(-2)
        return self.output_projection(y.to(x.dtype)), state
