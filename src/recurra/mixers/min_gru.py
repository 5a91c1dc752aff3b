"""minGRU: a GRU with gates that ignore the state, hence a linear recurrence (Feng et al., arXiv 2410.01201)."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurra.layers.norms import at_least_float32
from recurra.lengths import mask_fill
from recurra.mixers.base import Mixer, StateSpec, register_mixer
from recurra.ops.scan.operator import linear_scan
from recurra.state import last_step


class MinGRUState(NamedTuple):
    """The last hidden state."""

    h: Float[Tensor, "B D"]


@register_mixer("min-gru")
class MinGRU(Mixer):
    """h_t = (1 - z_t) * h_{t-1} + z_t * c_t, z_t = sigmoid(W_z x_t), c_t = W_h x_t (section 3.1); y_t = h_t.

    Not the authors' layer (models/minRNNs.py of github.com/BorealisAI/minRNNs), which takes c_t = g(W_h x_t), positive
    (appendix B: g(x) = x + 1/2 from 0 on and sigmoid(x) below), in a wider h, and projects h to y. Both have biases.
    """

    skips_padding = True
    is_linear_recurrence = True

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model, MinGRUState, h=StateSpec((d_model,)))
        self.gate_and_candidate = nn.Linear(d_model, 2 * d_model)

    def transition(self, x: Float[Tensor, "B L D"]) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B L D"]]:
        """Return 1 - z_t and its phase, which is 0, for every channel."""
        a = torch.sigmoid(-at_least_float32(self.gate_and_candidate(x)).chunk(2, -1)[0])
        return a, torch.zeros_like(a)

    def mix(self, x: Tensor, state: MinGRUState, mask: Tensor | None) -> tuple[Tensor, MinGRUState]:
        gate, candidate = at_least_float32(self.gate_and_candidate(x)).chunk(2, -1)
        z = mask_fill(torch.sigmoid(gate), mask, 0)
        a, b = 1 - z, z * candidate

        def run(h0: Tensor) -> tuple[Tensor, Tensor]:
            h = linear_scan(a, b, h0)
            return h, last_step(h, h0)

        h, last = self.recur(run, a, state.h)
        return h.to(x.dtype), MinGRUState(last)
