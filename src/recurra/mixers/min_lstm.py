"""minLSTM: an LSTM whose gates do not look at the state, and so a linear recurrence (Feng et al., arXiv 2410.01201)."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.layers.norms import at_least_float32
from recurra.lengths import mask_fill
from recurra.mixers.base import Mixer, StateSpec
from recurra.mixers.registry import register_mixer
from recurra.ops.scan.operator import linear_scan
from recurra.state import last_step


class MinLSTMState(NamedTuple):
    """The last hidden state, float32 whatever the precision of the input (float64 in a float64 layer)."""

    h: Float[Tensor, "B D"]


@register_mixer("min-lstm")
class MinLSTM(Mixer):
    """h_t = f_t / (f_t + i_t) * h_{t-1} + i_t / (f_t + i_t) * c_t; y_t = h_t (section 3.2).

    f_t = sigmoid(W_f x_t) and i_t = sigmoid(W_i x_t) are the forget and the input gate, c_t = W_h x_t the candidate.
    The gates are divided by their sum, as published, so that the size of the state does not depend on time. The layer
    has neither a tanh nor an output gate. The quotient is one sigmoid, of log i_t - log f_t, and never 0 / 0.

    Args:
        d_model: channels of x, y and the hidden state.
    """

    skips_padding = True
    is_linear_recurrence = True

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model, MinLSTMState, h=StateSpec((d_model,)))
        self.gates_and_candidate = nn.Linear(d_model, 3 * d_model)

    def mix(
        self, x: Float[Tensor, "B L d_model"], state: MinLSTMState, mask: Bool[Tensor, "B L"] | None
    ) -> tuple[Float[Tensor, "B L d_model"], MinLSTMState]:
        """Run the recurrence by a parallel scan."""
        forget, write, candidate = at_least_float32(self.gates_and_candidate(x)).chunk(3, -1)
        share = mask_fill(torch.sigmoid(functional.softplus(-forget) - functional.softplus(-write)), mask, 0)
        a, b = 1 - share, share * candidate

        def run(h0: Tensor) -> tuple[Tensor, Tensor]:
            h = linear_scan(a, b, h0)
            return h, last_step(h, h0)

        h, last = self.recur(run, a, state.h)
        return h.to(x.dtype), MinLSTMState(last)
