"""RWKV-7's time mixing (Peng et al. 2025, "RWKV-7 Goose with Expressive Dynamic State Evolution", arXiv 2503.14456)."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import require_at_least, require_heads, require_positive
from recurra.layers.convolution import with_previous
from recurra.layers.norms import at_least_float32
from recurra.lengths import mask_fill
from recurra.mixers.base import Mixer, StateSpec, register_mixer
from recurra.ops.delta_rule.generalised import generalised_delta_rule

_FASTEST = math.exp(-0.5)  # the decay is exp(-0.61) = 0.55 or slower


class RWKV7State(NamedTuple):
    """The memory of each head, and the last input."""

    h: Float[Tensor, "B H d d"]
    """Keys to values: the transpose of the paper's."""
    x: Float[Tensor, "B d_model"]
    """The last step's input, for the token shift."""


@register_mixer("rwkv7")
class RWKV7(Mixer):
    """y_t = W_o (g_t * (norm(r_t h_t) + (r_t * p) k_t^T v_t)): the delta rule, removing and writing different keys,

        h_t = (diag(w_t) - (a_t * kk_t)^T kk_t) h_{t-1} + k_t^T v_t.

    r, w, k, v, a and g see x_t + mu * (x_{t-1} - x_t), each with its own mu: the token shift. Of k' = W_k x, kk_t is
    k' * k_k, of length 1 in each head, and what is written k_t = k' * (1 + (a_t - 1) * k_a). By channel are the decay
    w_t = exp(-exp(-1/2) sigmoid(w_0 + W_w2 tanh(W_w1 x))), the rate a_t = sigmoid(a_0 + W_a2 W_a1 x), and the gate
    g_t = W_g2 sigmoid(W_g1 x). The norm is a layer norm of each head; p is the bonus of the step itself.

    In a model of several, the values of the first are passed on beside the residual stream, and all others take
    v_t + (v_first - v_t) * sigmoid(v_0 + W_v2 W_v1 x). A mixer by itself is a first one.

    Channel mixing, the other half of a published block, is the mixer `rwkv7-channel-mixing`. Decided: all layers start
    as the first published one, as a mixer does not know the depth, and all matrices but the second ones of low rank as
    linear layers do: in the authors' code the first ones are zeros, and the second ones then have no gradient.

    Args:
        n_heads: heads; d_model / 64, as published, or the next smaller number that divides d_model, if None.
        decay_rank: rows of W_w1; 2.5 sqrt(d_model), as published for heads of 64 channels, if None. That and the other
            ranks are rounded to multiples of 32.
        rate_rank: rows of W_a1; 2.5 sqrt(d_model) if None.
        value_rank: rows of W_v1; 1.7 sqrt(d_model) if None.
        gate_rank: rows of W_g1; 5 sqrt(d_model) if None.
        norm_epsilon: what the norm adds to the variance; 64e-5 as published.
        layer: which of the mixers of this name in a model it is, counted from 1 by the model; None for one by itself.
    """

    skips_padding = True
    transition_looks_back = True

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        decay_rank: int | None = None,
        rate_rank: int | None = None,
        value_rank: int | None = None,
        gate_rank: int | None = None,
        norm_epsilon: float = 64e-5,
        layer: int | None = None,
    ) -> None:
        n_heads = usual_heads(d_model) if n_heads is None else n_heads
        require_heads(n_heads, d_model=d_model)
        require_positive(norm_epsilon=norm_epsilon)
        d_head = d_model // n_heads
        given = {"decay_rank": decay_rank, "rate_rank": rate_rank, "value_rank": value_rank, "gate_rank": gate_rank}
        ranks = usual_ranks(d_model, d_head) | {name: rank for name, rank in given.items() if rank is not None}
        require_at_least(1, **ranks)
        if layer is not None:
            require_at_least(1, layer=layer)
        super().__init__(d_model, RWKV7State, h=StateSpec((n_heads, d_head, d_head)), x=StateSpec((d_model,)))
        self.n_heads, self.norm_epsilon, self.layer = n_heads, norm_epsilon, layer
        self.d_carried = 0 if layer is None else d_model
        self.d_output = d_model + self.d_carried
        self.shift = nn.Parameter(torch.empty(6, d_model))  # mu of r, w, k, v, a and g
        self.receptance, self.key, self.value = (nn.Linear(d_model, d_model, bias=False) for _ in range(3))
        self.decay_projection = _low_rank(d_model, ranks["decay_rank"], nn.Tanh())
        self.decay_bias = nn.Parameter(torch.empty(d_model))
        self.rate_projection = _low_rank(d_model, ranks["rate_rank"], bias=True)
        if layer is not None and layer > 1:
            self.value_projection = _low_rank(d_model, ranks["value_rank"], bias=True)
        self.gate_projection = _low_rank(d_model, ranks["gate_rank"], nn.Sigmoid())
        self.removal_scale, self.rate_share = (nn.Parameter(torch.empty(d_model)) for _ in range(2))  # k_k and k_a
        self.bonus = nn.Parameter(torch.empty(n_heads, d_head))
        self.norm_weight, self.norm_bias = nn.Parameter(torch.ones(d_model)), nn.Parameter(torch.zeros(d_model))
        self.output_projection = nn.Linear(d_model, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start as a first layer of the authors' code does, but for linear layers, which came before."""
        n, d_head = torch.arange(self.d_model), self.d_model // self.n_heads
        slope, place = n / max(self.d_model - 1, 1), 2 * (n % d_head) / max(d_head - 1, 1) - 1
        zigzag = place * place.abs()
        powers = torch.tensor([0.2, 0.9, 0.7, 0.7, 0.9, 0.2])
        self.shift.copy_(1 - (n / self.d_model) ** powers[:, None])
        self.decay_bias.copy_(6 * slope - 5.5 + 2.5 * zigzag)
        self.removal_scale.copy_(0.71 - 0.1 * (slope - 0.5))
        self.rate_share.fill_(1.02)
        self.bonus.fill_(-0.04)
        biases = {"decay": None, "rate": 0.3 * zigzag + 0.4 * (slope - 0.5) - 0.19, "gate": None}
        if self.layer is not None and self.layer > 1:
            biases["value"] = 0.73 - 0.4 * (slope - 0.5)
        for name, bias in biases.items():
            second: nn.Linear = getattr(self, f"{name}_projection")[2]
            nn.init.orthogonal_(second.weight, 0.1)
            if bias is not None:
                second.bias.copy_(bias)

    def transition_parameters(self) -> set[nn.Parameter]:
        return {self.decay_bias, *self.decay_projection.parameters()}

    def transition(
        self, x: Float[Tensor, "B L d_x"], state: RWKV7State | None = None
    ) -> tuple[Float[Tensor, "B L d_model"], Float[Tensor, "B L d_model"]]:
        """Return the decay w_t of every key channel and its phase, which is 0."""
        last = x.new_zeros(len(x), self.d_model) if state is None else state.x
        now, previous, _ = with_previous(x[..., : self.d_model], at_least_float32(last), None)
        w = self._decay((now + at_least_float32(self.shift[1]) * (previous - now)).to(x.dtype))
        return w, torch.zeros_like(w)

    def _decay(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L d_model"]:
        rate = torch.sigmoid(at_least_float32(self.decay_projection(x)) + at_least_float32(self.decay_bias))
        return torch.exp(-_FASTEST * rate)

    def mix(self, x: Tensor, state: RWKV7State, mask: Tensor | None) -> tuple[Tensor, RWKV7State]:
        x, carried = x.split([self.d_model, self.d_carried], -1)
        now, previous, last = with_previous(x, state.x, mask)
        shifted = now[:, :, None] + at_least_float32(self.shift) * (previous - now)[:, :, None]
        of_r, of_w, of_k, of_v, of_a, of_g = shifted.to(x.dtype).unbind(2)
        r, k, v = (at_least_float32(x) for x in (self.receptance(of_r), self.key(of_k), self.value(of_v)))
        a = torch.sigmoid(at_least_float32(self.rate_projection(of_a)))
        if self.layer == 1:
            carried = v
        elif self.layer is not None:
            share = torch.sigmoid(at_least_float32(self.value_projection(of_v)))
            v = v + (at_least_float32(carried) - v) * share
        y, h = self._recur(r, mask_fill(self._decay(of_w), mask, 1), k, v, a, state.h, mask)
        y = self.output_projection((y * self.gate_projection(of_g)).to(x.dtype))
        return y if self.layer is None else torch.cat([y, carried.to(y.dtype)], -1), RWKV7State(h, last)

    def _recur(
        self, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, h: Tensor, mask: Tensor | None
    ) -> tuple[Float[Tensor, "B L d_model"], Float[Tensor, "B H d d"]]:
        """Remove, write and read, all (B, L, d_model); add the bonus to the normalised outputs."""
        removed = self._heads(k * at_least_float32(self.removal_scale))
        # as functional.normalize does, with a finite derivative at zero, where a length has none
        removed = removed * torch.rsqrt(removed.square().sum(-1, keepdim=True).clamp_min(1e-24))
        k = k * (1 + (a - 1) * at_least_float32(self.rate_share))
        r, w, k, v, a = (self._heads(x) for x in (r, w, k, v, a))
        y, h = generalised_delta_rule(r, mask_fill(k, mask, 0), v, w, removed, mask_fill(-a * removed, mask, 0), h)
        y = functional.layer_norm(y, y.shape[-1:], eps=self.norm_epsilon).flatten(-2)
        bonus = (r * k * at_least_float32(self.bonus)).sum(-1, keepdim=True) * v
        return y * at_least_float32(self.norm_weight) + at_least_float32(self.norm_bias) + bonus.flatten(-2), h

    def _heads(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L H d"]:
        return x.unflatten(-1, (self.n_heads, -1))


def usual_heads(d_model: int) -> int:
    """Return the number of heads of 64 channels or a few more."""
    return next(n for n in range(max(1, d_model // 64), 0, -1) if d_model % n == 0)


def usual_ranks(d_model: int, d_head: int) -> dict[str, int]:
    """Return the default ranks, which are multiples of 32, by the names of their options."""
    factors = {"decay_rank": 2.5 * d_head / 64, "rate_rank": 2.5 * d_head / 64, "value_rank": 1.7 * d_head / 64}
    factors["gate_rank"] = 5.0
    return {name: max(32, 32 * round(factor * d_model**0.5 / 32)) for name, factor in factors.items()}


def _low_rank(d_model: int, rank: int, activation: nn.Module | None = None, bias: bool = False) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(d_model, rank, bias=False), activation or nn.Identity(), nn.Linear(rank, d_model, bias=bias)
    )
