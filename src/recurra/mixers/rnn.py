"""A recurrent cell over a sequence (CRT section 3: the memory RNN and the position RNN)."""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils import parametrize

from recurra.cells import GRUCell, gru_sequence
from recurra.lengths.padded import in_pieces


def cells_prepared_once() -> AbstractContextManager[None]:
    """Let every cell make what its calls share (an NCGRU's orthogonal matrix) once in a `with` block, not once a call.

    The weights must not change inside. Gradients flow through what is shared as they would through each. While
    torch.compile traces it does nothing.
    """
    return nullcontext() if torch.compiler.is_compiling() else parametrize.cached()


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

        `mask` and `cu_seqlens` are those of `recurra.lengths.padded`.

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
        y, h = gru_sequence(self.cell, projected, h, weights)
        return y.to(projected.dtype), RNNState(h)
