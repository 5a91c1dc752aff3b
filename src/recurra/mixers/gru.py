"""torch's GRU as a time-mixing layer: the classic recurrence, which trains step by step, to compare others with."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.kernels.operators import transforms_are_active
from recurra.layers.precision import at_least_float32
from recurra.mixers.base import Carried, Mixer
from recurra.mixers.registry import register_mixer


class GRUState(NamedTuple):
    """The last hidden state, float32 whatever the precision of the input (float64 in a float64 layer)."""

    h: Float[Tensor, "B N"]


@register_mixer("gru")
class GRU(Mixer):
    """y_t = h_t of `torch.nn.GRU` with one layer (Cho et al., arXiv 1406.1078, with the reset gate after the product).

    It has no parallel form over time: training takes one step after the other. Under autocast it computes in the
    precision of its weights. The Compact Recurrent Transformer uses another cell, whose reset gate acts before the
    product: `recurra.mixers.RNN` runs it.

    Args:
        d_model: channels of x and y, and of the hidden state.

    Raises:
        ValueError: d_model is below 1.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model, GRUState, h=Carried((d_model,)))
        self.cell = nn.GRUCell(d_model, d_model)

    def why_not_exportable(self) -> str:
        """It unrolls."""
        return "gru runs step by step, and its graph has as many steps as the prompt that it was traced with"

    def mix(
        self, x: Float[Tensor, "B L d_model"], state: GRUState, mask: None
    ) -> tuple[Float[Tensor, "B L d_model"], GRUState]:
        """Run the GRU along time."""
        cell = self.cell
        h = state.h.to(cell.weight_hh.dtype)
        weights = (cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
        # nn.GRU's own function, as torch.compile refuses the module; on a GPU autocast would take it down to 16 bits
        with torch.autocast(x.device.type, enabled=False):
            if transforms_are_active():  # torch.gru has no rules for them
                y, last = _step_by_step(x.to(h.dtype), h, *weights)
                return y.to(x.dtype), GRUState(at_least_float32(last))
            # with biases, one layer, no dropout, one direction, batch first
            y, last = torch.gru(x.to(h.dtype), h.unsqueeze(0), weights, True, 1, 0.0, self.training, False, True)
        return y.to(x.dtype), GRUState(at_least_float32(last.squeeze(0)))


def _step_by_step(
    x: Float[Tensor, "B L d_model"], h: Float[Tensor, "B N"], w_x: Tensor, w_h: Tensor, b_x: Tensor, b_h: Tensor
) -> tuple[Float[Tensor, "B L N"], Float[Tensor, "B N"]]:
    """Compute what `torch.gru` computes from the weights of a `torch.nn.GRUCell`, in plain operators."""
    states = []
    for step in functional.linear(x, w_x, b_x).unbind(1):
        r_x, u_x, c_x = step.chunk(3, -1)
        r_h, u_h, c_h = functional.linear(h, w_h, b_h).chunk(3, -1)
        candidate = torch.tanh(c_x + torch.sigmoid(r_x + r_h) * c_h)
        h = torch.lerp(candidate, h, torch.sigmoid(u_x + u_h))
        states.append(h)
    return torch.stack(states, 1), h
