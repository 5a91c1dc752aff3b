"""Griffin's recurrent block with its real-gated linear recurrent unit (De et al. 2024, "Griffin: Mixing Gated Linear
Recurrences with Local Attention for Efficient Language Models", arXiv 2402.19427).
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import require_at_least, require_heads
from recurra.layers.convolution import ShortConvolution
from recurra.layers.feed_forward import BlockDiagonalLinear
from recurra.layers.norms import at_least_float32
from recurra.lengths import mask_fill
from recurra.mixers.base import Mixer, StateSpec, register_mixer
from recurra.ops.scan.operator import linear_scan
from recurra.state import last_step

_C = 8.0  # the paper's c
_BLOCK = 256  # channels of a gate's block in the published RecurrentGemma


class RGLRUState(NamedTuple):
    """The hidden state, the convolution, and a flag for whether the stream has begun."""

    h: Float[Tensor, "B D"]
    convolution: Float[Tensor, "B K_1 D"]
    """The last inputs of the convolution."""
    started: Float[Tensor, "B 1"]
    """0 at the start of a stream, 1 from its first step on."""


@register_mixer("rg-lru")
class RGLRU(Mixer):
    """y_t = W_y (GELU(W_g x_t) * h_t): h is an RG-LRU over u = a short convolution of W_u x (section 2.4).

        h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t * u_t),  a_t = exp(-8 softplus(decay) r_t)  (De et al. (1)-(4))

    r_t and i_t, the recurrence gate and the input gate, are sigmoids of block-diagonal projections of u_t. The input's
    factor gives h the variance of u for any a. It is computed as -expm1(2 log a), which stays precise near a = 1; where
    a rounds to 1, its gradient is 0 and not infinite.

    Our choices: at the first step of a stream, the factor is 1, as in the published code and weights. A state of zeros
    does not show that a stream is new, so the state has a flag. `decay` is initialised to make a_t at r_t = 1 uniform
    between `r_min` and `r_max`, as in the paper. GELU is the tanh approximation, as in the published code.

    Args:
        lru_width: channels of the recurrence; `d_model` if None.
        n_heads: blocks of the gates' projections; one for every 256 channels, as published, if None, and at least one.
        d_conv: steps that the convolution sees, the current one included.
        r_min, r_max: range of the initial a at a recurrence gate of 1, 0 < r_min < r_max < 1.
    """

    skips_padding = True
    transition_looks_back = True

    def __init__(
        self,
        d_model: int,
        *,
        lru_width: int | None = None,
        n_heads: int | None = None,
        d_conv: int = 4,
        r_min: float = 0.9,
        r_max: float = 0.999,
    ) -> None:
        lru_width = d_model if lru_width is None else lru_width
        n_heads = max(1, lru_width // _BLOCK) if n_heads is None else n_heads
        require_heads(n_heads, lru_width=lru_width)
        require_at_least(1, d_conv=d_conv)
        if not 0 < r_min < r_max < 1:
            raise ValueError(f"r_min is {r_min} and r_max {r_max}; expected 0 < r_min < r_max < 1")
        window = StateSpec((d_conv - 1, lru_width))
        super().__init__(d_model, RGLRUState, h=StateSpec((lru_width,)), convolution=window, started=StateSpec((1,)))
        self.gate = nn.Linear(d_model, lru_width)
        self.input_projection = nn.Linear(d_model, lru_width)
        self.convolution = ShortConvolution(lru_width, d_conv)
        self.recurrence_gate = BlockDiagonalLinear(lru_width, n_heads)
        self.input_gate = BlockDiagonalLinear(lru_width, n_heads)
        a = r_min + (r_max - r_min) * torch.rand(lru_width, dtype=torch.float64)
        decay = torch.log(torch.expm1(-torch.log(a) / _C))  # softplus of it is -log(a) / c
        self.decay = nn.Parameter(decay.to(torch.get_default_dtype()))
        self.output_projection = nn.Linear(lru_width, d_model)

    def transition_parameters(self) -> set[nn.Parameter]:
        return {self.decay, *self.recurrence_gate.parameters()}

    def transition(
        self, x: Float[Tensor, "B L d_model"], state: RGLRUState | None = None
    ) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B L D"]]:
        """Return a_t and its phase, which is 0, for every channel, after `state`; None starts a stream."""
        u, _ = self.convolution(self.input_projection(x), None if state is None else state.convolution)
        a = torch.exp(self._log_decay(u))
        return a, torch.zeros_like(a)

    def mix(self, x: Tensor, state: RGLRUState, mask: Tensor | None) -> tuple[Tensor, RGLRUState]:
        gate = functional.gelu(self.gate(x), approximate="tanh")
        u, window = self.convolution(self.input_projection(x), state.convolution, mask)
        log_a, i = self._log_decay(u), torch.sigmoid(at_least_float32(self.input_gate(u)))
        power = -torch.expm1(2 * log_a)  # 1 - a^2
        factor = torch.sqrt(power.clamp(min=torch.finfo(power.dtype).tiny))
        first = _first_steps(state.started, x.shape[1], mask)[..., None]
        factor = first + (1 - first) * factor
        h = linear_scan(
            mask_fill(torch.exp(log_a), mask, 1), mask_fill(factor * i * at_least_float32(u), mask, 0), state.h
        )
        started = torch.ones_like(state.started)
        if mask is not None:
            started = torch.where(mask.any(1, keepdim=True), started, state.started)
        y = self.output_projection((h * gate).to(x.dtype))
        return y, RGLRUState(last_step(h, state.h), window, started)

    def _log_decay(self, u: Tensor) -> Float[Tensor, "B L D"]:
        r = torch.sigmoid(at_least_float32(self.recurrence_gate(u)))
        return -_C * functional.softplus(at_least_float32(self.decay)) * r


def _first_steps(started: Float[Tensor, "B 1"], length: int, mask: Bool[Tensor, "B L"] | None) -> Float[Tensor, "B L"]:
    """1 at the first counted step of every stream, 0 elsewhere."""
    if mask is None:
        return functional.pad(1 - started, (0, length - 1))
    return (mask & (mask.cumsum(1) == 1)) * (1 - started)
