"""minLSTM: an LSTM with gates that ignore the state, hence a linear recurrence (Feng et al., arXiv 2410.01201)."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.layers.norms import at_least_float32
from recurra.lengths import mask_fill
from recurra.mixers.base import Mixer, StateSpec, register_mixer
from recurra.ops.scan.operator import linear_scan
from recurra.state import last_step


class MinLSTMState(NamedTuple):
    """The last hidden state."""

    h: Float[Tensor, "B D"]


@register_mixer("min-lstm")
class MinLSTM(Mixer):
    """h_t = f_t / (f_t + i_t) * h_{t-1} + i_t / (f_t + i_t) * c_t; y_t = h_t (section 3.2).

    Not the authors' layer (models/minRNNs.py of github.com/BorealisAI/minRNNs), which takes c_t = g(W_h x_t), positive
    (appendix B: g(x) = x + 1/2 from 0 on and sigmoid(x) below), in a wider h, and projects h to y. Both have biases.

    f_t = sigmoid(W_f x_t), i_t = sigmoid(W_i x_t), c_t = W_h x_t. Each quotient is computed as a sigmoid of log i_t
    - log f_t, which is never 0 / 0.
    """

    skips_padding = True
    is_linear_recurrence = True

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model, MinLSTMState, h=StateSpec((d_model,)))
        self.gates_and_candidate = nn.Linear(d_model, 3 * d_model)

    def transition(self, x: Float[Tensor, "B L D"]) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B L D"]]:
        """Return f_t / (f_t + i_t) and its phase, which is 0, for every channel."""
        forget, write, _ = at_least_float32(self.gates_and_candidate(x)).chunk(3, -1)
        a = torch.sigmoid(functional.softplus(-write) - functional.softplus(-forget))
        return a, torch.zeros_like(a)

    def mix(self, x: Tensor, state: MinLSTMState, mask: Tensor | None) -> tuple[Tensor, MinLSTMState]:
        forget, write, candidate = at_least_float32(self.gates_and_candidate(x)).chunk(3, -1)
        share = mask_fill(torch.sigmoid(functional.softplus(-forget) - functional.softplus(-write)), mask, 0)
        a, b = 1 - share, share * candidate

        def run(h0: Tensor) -> tuple[Tensor, Tensor]:
            h = linear_scan(a, b, h0)
            return h, last_step(h, h0)

        h, last = self.recur(run, a, state.h)
        return h.to(x.dtype), MinLSTMState(last)
