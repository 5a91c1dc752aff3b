"""A recurrent cell over a sequence (CRT section 3: the memory RNN and the position RNN)."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from recurra.checks import kind_of, sentence
from recurra.mixers.base import Mixer, StateSpec
from recurra.ops.cells.gru import GRUCell, RecurrentWeights, gru_sequence


class RNNState(NamedTuple):
    """The last hidden state."""

    h: Float[Tensor, "B H"]


class RNN(Mixer):
    """y_t = h_t = cell(x_t, h_{t-1}).

    The products with x are one matrix product for all steps; values shared by all steps are computed once per call.

    Args:
        cell: `recurra.ops.cells.gru.GRUCell` or `recurra.ops.cells.orthogonal.NCGRUCell`.
    """

    def __init__(self, cell: nn.Module) -> None:
        if not isinstance(cell, GRUCell):
            got = f"{kind_of(cell)} of {type(cell).__module__}"
            raise TypeError(sentence("cell", got, "a GRUCell or NCGRUCell of recurra.ops.cells"))
        super().__init__(cell.input_size, RNNState, h=StateSpec((cell.hidden_size,)))
        self.d_output = cell.hidden_size
        self.cell = cell

    def mix(
        self, x: Float[Tensor, "B L D"], state: RNNState, mask: None, weights: RecurrentWeights | None = None
    ) -> tuple[Float[Tensor, "B L H"], RNNState]:
        """Run the cell along time; `weights`: what `cell.recurrent_weights()` returned, for several calls."""
        projected = self.cell.project(x)
        weights = self.cell.recurrent_weights() if weights is None else weights
        weights = RecurrentWeights(*(weight.to(projected.dtype) for weight in weights))
        y, h = gru_sequence(self.cell, projected, self.cell.entering(state.h, x.shape[0]), weights)
        return y.to(projected.dtype), RNNState(h)
