"""DeltaNet: linear attention that replaces the value stored under a key (Yang et al. 2024, arXiv 2406.06484)."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from recurra.checks import require, require_at_least, require_heads, require_positive
from recurra.layers.convolution import ShortConvolution
from recurra.layers.norms import RMSNorm, at_least_float32, unit_length
from recurra.layers.state_space import spread_over_heads
from recurra.lengths import mask_fill
from recurra.mixers.base import Mixer, StateSpec, register_mixer
from recurra.ops.delta_rule.operator import delta_rule


class DeltaNetState(NamedTuple):
    """h_t = (I - b_t k_t^T k_t) diag(a_t) h_{t-1} + b_t k_t^T v_t (DeltaNet: a_t = 1), and last inputs."""

    h: Float[Tensor, "B H d_k d_v"]
    inputs: Float[Tensor, "B K_1 channels"]


class DeltaMixer(Mixer):
    """The parts that DeltaNet, Gated DeltaNet and KDA share: projections, convolution, rate b_t, operator and norm.

    Subclasses define `mix`, which computes the output. Arguments are those of `DeltaNet`, with all sizes given.
    """

    skips_padding = True

    def __init__(
        self,
        d_model: int,
        d_qk: int,
        d_v: int,
        n_heads: int,
        kernel_size: int,
        negative_eigenvalues: bool,
        n_qk_heads: int | None = None,
        norm_epsilon: float = 1e-5,
    ) -> None:
        n_qk_heads = n_heads if n_qk_heads is None else n_qk_heads
        require_at_least(1, n_heads=n_heads, d_qk=d_qk, n_qk_heads=n_qk_heads)
        require(n_heads % n_qk_heads == 0, "n_qk_heads", n_qk_heads, f"a divisor of n_heads = {n_heads}")
        name = "n_heads" if n_qk_heads == n_heads else "n_qk_heads"
        require(d_qk % n_qk_heads == 0, name, n_qk_heads, f"a divisor of d_qk = {d_qk}")
        require_heads(n_heads, d_v=d_v)
        require_positive(norm_epsilon=norm_epsilon)
        convolution = ShortConvolution(2 * d_qk + d_v, kernel_size, bias=False)
        super().__init__(
            d_model,
            DeltaNetState,
            h=StateSpec((n_heads, d_qk // n_qk_heads, d_v // n_heads)),
            inputs=StateSpec((kernel_size - 1, 2 * d_qk + d_v)),
        )
        self.d_qk, self.d_v, self.n_heads, self.n_qk_heads = d_qk, d_v, n_heads, n_qk_heads
        self.largest_rate = 2.0 if negative_eigenvalues else 1.0
        self.qkv = nn.Linear(d_model, 2 * d_qk + d_v, bias=False)
        self.convolution = convolution
        self.rate_projection = nn.Linear(d_model, n_heads, bias=False)
        self.norm = RMSNorm(d_v // n_heads, norm_epsilon)
        self.output_projection = nn.Linear(d_v, d_model, bias=False)

    def read(
        self,
        x: Float[Tensor, "B L d_model"],
        a: Float[Tensor, "B L H *d_k"] | None,
        state: DeltaNetState,
        mask: Bool[Tensor, "B L"] | None,
    ) -> tuple[Float[Tensor, "B L d_v"], DeltaNetState]:
        """Convolve, and run the delta rule with decay `a`, 1 if None; the outputs of the heads side by side."""
        qkv, inputs = self.convolution(self.qkv(x), state.inputs, mask, silu=True)
        parts, heads = qkv.split([self.d_qk, self.d_qk, self.d_v], -1), (self.n_qk_heads, self.n_qk_heads, self.n_heads)
        q, k, v = (part.unflatten(-1, (n, -1)) for part, n in zip(parts, heads))
        q, k = (spread_over_heads(part, self.n_heads) for part in (q, k))
        b = mask_fill(self._rate(x), mask, 0)
        a = b.new_ones(()).expand(b.shape) if a is None else mask_fill(a, mask, 1)
        y, h = delta_rule(unit_length(q) * q.shape[-1] ** -0.5, unit_length(k), v, a, b, state.h)
        return y.flatten(-2), DeltaNetState(h, inputs)

    def _rate(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L H"]:
        return self.largest_rate * torch.sigmoid(at_least_float32(self.rate_projection(x)))


@register_mixer("delta-net")
class DeltaNet(DeltaMixer):
    """y_t = norm(q_t h_t / sqrt(d_k)) W_o, h_t = (I - b_t k_t^T k_t) h_{t-1} + b_t k_t^T v_t (sections 2.2 and 3.4).

    q, k, v = SiLU(convolution(W x)), a causal filter of K steps per channel; then q and k have length 1 in each head.
    b_t = sigmoid(W_b x_t), one number per head: 1 replaces a key's old value, 0 changes nothing. The norm is a root
    mean square norm of each head, with one scale for all heads; projections and convolutions have no biases.

    Args:
        d_qk: channels of queries and keys over all heads; `d_model`, as published, if None.
        d_v: channels of the values over all heads; `d_model`, as published, if None.
        n_heads: heads; published models have d_model / 128.
        kernel_size: K, the steps that the convolution sees, the newest included.
        negative_eigenvalues: b_t = 2 sigmoid(W_b x_t). The transition's eigenvalue 1 - b_t along k_t then ranges from
            1 to -1, and the layer can count modulo 2 (Grazzi et al. 2025, arXiv 2411.12537).
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
    ) -> None:
        d_qk, d_v = d_model if d_qk is None else d_qk, d_model if d_v is None else d_v
        super().__init__(d_model, d_qk, d_v, n_heads, kernel_size, negative_eigenvalues)

    def transition(self, x: Float[Tensor, "B L d_model"]) -> tuple[Float[Tensor, "B L H"], Float[Tensor, "B L H"]]:
        """Return the transition along the key, 1 - b_t, of every head; its phase is pi where it is negative."""
        a = 1 - self._rate(x)
        return a.abs(), math.pi * (a < 0)

    def mix(self, x: Tensor, state: DeltaNetState, mask: Tensor | None) -> tuple[Tensor, DeltaNetState]:
        y, state = self.read(x, None, state, mask)
        y = self.norm(y.unflatten(-1, (self.n_heads, -1))).flatten(-2)
        return self.output_projection(y.to(x.dtype)), state
