"""The sLSTM: an LSTM with exponential gating and heads (Beck et al. 2024, "xLSTM: Extended Long Short-Term Memory",
arXiv 2405.04517, section 2.2).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import require, require_heads
from recurra.layers.norms import at_least_float32
from recurra.mixers.base import Mixer, StateSpec, register_mixer
from recurra.ops._operator import without_autocast
from recurra.ops.cells.slstm import SLSTMParts, slstm_sequence


class SLSTMState(NamedTuple):
    """The cell, its scale and the hidden state."""

    c: Float[Tensor, "B D"]
    """The cell, scaled: exp(-m) c."""
    n: Float[Tensor, "B D"]
    """The normaliser, scaled: exp(-m) n. It is 0 at the start of a stream, and at least 1 afterwards."""
    m: Float[Tensor, "B D"]
    """The stabiliser."""
    h: Float[Tensor, "B D"]
    """The hidden state, which the gates of the next step see."""


@register_mixer("slstm")
class SLSTM(Mixer):
    """y_t = norm(h_t), h_t = o_t * c_t / n_t  (Beck et al. (8)-(14))

        c_t = f_t * c_{t-1} + i_t * tanh(z),  n_t = f_t * n_{t-1} + i_t
        f_t = sigmoid(f),  i_t = exp(i),  o_t = sigmoid(o)

    The authors' layer (xlstm/blocks/slstm/layer.py of github.com/NX-AI/xlstm) differs: by default it computes i and f
    from a short convolution of x and SiLU, and all its W are block-diagonal by heads. The cell and the norm are equal.

    z, i, f and o are W x_t + R h_{t-1} + b with their own weights; R is block-diagonal: channels meet within a head. An
    exponential gate can grow without bound, so the state has c and n times exp(-m), with the stabiliser m_t =
    max(log f_t + m_{t-1}, log i_t) (Beck et al. (15)-(17)), through which no gradient flows: it cancels. The gates see
    h_{t-1}, so there is no parallel form; on a CPU, one kernel runs all steps.

    The norm is a group norm with a scale for each channel. Our choice: forget-gate biases start from 3 to 6 over the
    channels of each head (the authors' option "small_init"; their default falls from 5 to -7), all else as in torch's
    LSTM.

    Args:
        n_heads: heads, 4 as published.
    """

    transition_looks_back = True

    def __init__(self, d_model: int, *, n_heads: int = 4) -> None:
        require_heads(n_heads, d_model=d_model)
        require(d_model > n_heads, "d_model", d_model, f"at least 2 channels a head for the norm, {2 * n_heads} in all")
        super().__init__(d_model, SLSTMState, **dict.fromkeys(SLSTMState._fields, StateSpec((d_model,))))
        self.n_heads, d_head = n_heads, d_model // n_heads
        self.input_weights = nn.Linear(d_model, 4 * d_model)  # z, i, f, o, each of all heads
        bound = d_head**-0.5
        self.recurrent_weights = nn.Parameter(torch.empty(n_heads, d_head, 4 * d_head).uniform_(-bound, bound))
        self.norm_weight = nn.Parameter(torch.ones(d_model))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Open the forget gates. Call this again after re-initialising the weights."""
        forget = self.input_weights.bias.view(4, self.n_heads, -1)[2]
        forget.copy_(torch.linspace(3.0, 6.0, forget.shape[1]))

    def transition(
        self, x: Float[Tensor, "B L D"], state: SLSTMState | None = None
    ) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B L D"]]:
        """Return the forget gate and its phase, which is 0, for every channel, after `state`; None starts a stream."""
        projected, parts = self._parts(x, self.initial_state(x.shape[0]) if state is None else state)
        before = parts.h[:, None]
        with without_autocast(x):  # as `mix` does
            if x.shape[1] > 1:
                before = torch.cat([before, self._sequence(projected, parts)[0][:, :-1]], 1)
            recurrent = torch.einsum("blhd,hde->blhe", before, at_least_float32(self.recurrent_weights).chunk(4, -1)[2])
        f = torch.sigmoid(projected[:, :, 2] + recurrent).flatten(2)
        return f, torch.zeros_like(f)

    def mix(self, x: Tensor, state: SLSTMState, mask: None) -> tuple[Tensor, SLSTMState]:
        projected, parts = self._parts(x, state)
        with without_autocast(x):  # it would round the state to bfloat16 at every step
            y, last = self._sequence(projected, parts)
        y = functional.layer_norm(y, y.shape[-1:]).flatten(-2) * self.norm_weight
        return y.to(x.dtype), SLSTMState(*(part.flatten(1) for part in last))

    def _parts(self, x: Tensor, state: SLSTMState) -> tuple[Tensor, SLSTMParts]:
        """W x + b of all gates, and the state by heads."""
        projected = at_least_float32(self.input_weights(x)).unflatten(-1, (4, self.n_heads, -1))
        parts = SLSTMParts(*(part.unflatten(-1, (self.n_heads, -1)) for part in state))
        return projected, parts

    def _sequence(self, projected: Tensor, parts: SLSTMParts) -> tuple[Tensor, SLSTMParts]:
        return slstm_sequence(projected, at_least_float32(self.recurrent_weights), parts)
