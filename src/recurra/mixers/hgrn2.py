"""HGRN2: gated linear recurrence with state expansion (Qin et al. 2024, arXiv 2404.07904)."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import require_heads, require_probability
from recurra.layers.norms import RMSNorm, at_least_float32
from recurra.lengths import mask_fill
from recurra.mixers.base import Mixer, StateSpec, register_mixer
from recurra.ops._operator import without_autocast
from recurra.ops.gate_loop.operator import gate_loop

_EXPANSION = 128  # channels a head in the published language models


class HGRN2State(NamedTuple):
    """h_t = diag(f_t) h_{t-1} + (1 - f_t)^T i_t."""

    h: Float[Tensor, "B H d_head d_head"]


@register_mixer("hgrn2")
class HGRN2(Mixer):
    """y_t = W_y norm(o_t h_t), h_t = diag(f_t) h_{t-1} + (1 - f_t)^T i_t: the state contains weighted means of i.

    f_t = b + (1 - b) sigmoid(W_f x_t) is the forget gate with its lower bound b, and 1 - f_t the key. The output gate
    o_t = SiLU(W_o x_t) / sqrt(d_head) is the query, and the input i_t = W_i x_t the value (section 3). It is GateLoop
    with real transitions on the key side.

    Equal to flash-linear-attention (fla/layers/hgrn2.py of github.com/fla-org/flash-linear-attention) without its
    optional convolutions: it divides queries by sqrt(d_head), which the paper does not mention and which matters only
    because of the norm's epsilon, and its norm is a root mean square norm over all channels. Its models learn the
    bounds of all layers and channels together; a mixer does not see other layers, so its bound is a constant.

    Args:
        n_heads: heads; one for every 128 channels, the published expansion, if None, and at least one.
        lower_bound: minimum of the forget gate, in [0, 1).
    """

    skips_padding = True
    is_linear_recurrence = True

    def __init__(self, d_model: int, *, n_heads: int | None = None, lower_bound: float = 0.0) -> None:
        n_heads = max(1, d_model // _EXPANSION) if n_heads is None else n_heads
        require_heads(n_heads, d_model=d_model)
        require_probability(lower_bound=lower_bound)
        super().__init__(d_model, HGRN2State, h=StateSpec((n_heads, d_model // n_heads, d_model // n_heads)))
        self.n_heads, self.lower_bound = n_heads, lower_bound
        self.output_input = nn.Linear(d_model, 2 * d_model, bias=False)
        self.forget = nn.Linear(d_model, d_model, bias=False)
        self.norm = RMSNorm(d_model)
        self.output_projection = nn.Linear(d_model, d_model, bias=False)

    def transition_parameters(self) -> set[nn.Parameter]:
        return set(self.forget.parameters())

    def transition(self, x: Float[Tensor, "B L d_model"]) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B L D"]]:
        """Return the forget gate and its phase, which is 0, for every channel."""
        f = 1 - self._key(x)
        return f, torch.zeros_like(f)

    def mix(self, x: Tensor, state: HGRN2State, mask: Tensor | None) -> tuple[Tensor, HGRN2State]:
        o, i = at_least_float32(self.output_input(x)).chunk(2, -1)
        k = self._key(x)
        q, k, v, f = (part.unflatten(-1, (self.n_heads, -1)) for part in (functional.silu(o), k, i, 1 - k))
        with without_autocast(x):  # its matrix products would round sums to bfloat16
            q, k, f = q * q.shape[-1] ** -0.5, mask_fill(k, mask, 0), mask_fill(f, mask, 1)
            y, h = self.recur(lambda h0: gate_loop(q, k, v, f, state=h0), f, state.h)
        return self.output_projection(self.norm(y.flatten(-2)).to(x.dtype)), HGRN2State(h)

    def _key(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L D"]:
        """1 - f, formed as such: a difference of two numbers near 1 would lose its digits."""
        return (1 - self.lower_bound) * torch.sigmoid(-at_least_float32(self.forget(x)))
