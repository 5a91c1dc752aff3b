"""torch's GRU as a time-mixing layer: the classic recurrence, which trains step by step, to compare others with."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from recurra.layers.precision import at_least_float32, entering_state
from recurra.layers.sizes import check_sizes
from recurra.lengths.padded import in_pieces
from recurra.mixers.registry import register_mixer


class GRUState(NamedTuple):
    """The last hidden state, float32 whatever the precision of the input (float64 for a float64 layer)."""

    h: Float[Tensor, "B N"]


@register_mixer("gru")
class GRU(nn.Module):
    """y_t = h_t of `torch.nn.GRU` with one layer (Cho et al., arXiv 1406.1078, with the reset gate after the product).

    It has no parallel form over time: training takes as many steps, one after the other, as the sequence is long. Under
    autocast it computes in the precision of its weights. The Compact Recurrent Transformer's cell is another one, whose
    reset gate acts before the product: `recurra.mixers.RNN` has it.

    Args:
        d_model: channels of x and y, and of the hidden state.

    Raises:
        ValueError: d_model is below 1.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        check_sizes(d_model=d_model)
        self.cell = nn.GRUCell(d_model, d_model)

    def forward(
        self,
        x: Float[Tensor, "B L d_model"],
        state: GRUState | None = None,
        *,
        mask: Bool[Tensor, "B L"] | None = None,
        cu_seqlens: Int[Tensor, " borders"] | None = None,
    ) -> tuple[Float[Tensor, "B L d_model"], GRUState]:
        """Run the GRU along time, going on from `state`; None is the start of a stream.

        `mask` and `cu_seqlens` are those of `recurra.lengths.padded`.

        Raises:
            TypeError, ValueError: the mask or the borders do not fit x, or both are given;
                the state has another batch or size.
        """
        if mask is not None or cu_seqlens is not None:
            return in_pieces(self, x, state, mask=mask, cu_seqlens=cu_seqlens)
        cell = self.cell
        h = entering_state(None if state is None else state.h, (x.shape[0], cell.hidden_size), cell.weight_hh)
        if x.shape[1] == 0:  # torch's refuses it
            return x, GRUState(at_least_float32(h))
        weights = (cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
        # nn.GRU's own function, as torch.compile refuses the module; on a GPU autocast would take it down to 16 bits
        with torch.autocast(x.device.type, enabled=False):
            # with biases, one layer, no dropout, one direction, batch first
            y, last = torch.gru(x.to(h.dtype), h.unsqueeze(0), weights, True, 1, 0.0, self.training, False, True)
        return y.to(x.dtype), GRUState(at_least_float32(last.squeeze(0)))
