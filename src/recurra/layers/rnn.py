"""A recurrent cell over a sequence (CRT section 3: the memory RNN and the position RNN)."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from recurra.cells import GRUCell
from recurra.layers.variable_lengths import in_pieces


class RNNState(NamedTuple):
    """The last hidden state, float32 whatever the precision of the inputs (float64 for a float64 cell)."""

    h: Float[Tensor, "B H"]


class RNN(nn.Module):
    """y_t = h_t = cell(x_t, h_{t-1}).

    The products with x are one matrix product for all steps, and what the steps share (for NCGRU the orthogonal
    matrix) is made once a call; only the products with h go step by step. All arithmetic is the cell's.

    Args:
        cell: `recurra.cells.GRUCell` or `recurra.cells.NCGRUCell`.

    Raises:
        TypeError: `cell` is something else, a torch.nn.GRUCell, say, whose reset gate acts after the product.
    """

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        if not isinstance(cell, GRUCell):
            kind = type(cell)
            raise TypeError(
                f"cell is a {kind.__name__} of {kind.__module__}; expected a GRUCell or NCGRUCell of recurra.cells"
            )
        self.cell = cell

    def forward(
        self,
        x: Float[Tensor, "B L D"],
        state: RNNState | None = None,
        *,
        mask: Bool[Tensor, "B L"] | None = None,
        cu_seqlens: Int[Tensor, " borders"] | None = None,
    ) -> tuple[Float[Tensor, "B L H"], RNNState]:
        """Run the cell along time, going on from `state`; None is the start of a stream, h = 0.

        `mask` and `cu_seqlens` are those of `recurra.layers.variable_lengths`.

        Raises:
            TypeError, ValueError: x has another number of channels than the cell's input, or the state another batch or
                size; the mask or the borders do not fit x, or both are given.
        """
        if mask is not None or cu_seqlens is not None:
            return in_pieces(self, x, state, mask=mask, cu_seqlens=cu_seqlens)
        projected = self.cell.project(x)
        weights = self.cell.recurrent_weights(projected.dtype)
        h = projected.new_zeros(x.shape[0], self.cell.hidden_size) if state is None else state.h
        h = self.cell.entering(h, x.shape[0])
        states = []
        for projected_step in projected.unbind(1):
            h = self.cell.step(projected_step, h, weights)
            states.append(h)
        y = torch.stack(states, 1) if states else projected[..., : self.cell.hidden_size]
        return y.to(projected.dtype), RNNState(h)
