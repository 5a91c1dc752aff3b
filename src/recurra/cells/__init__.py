"""Cells: one step of a non-linear recurrence, `h = cell(x, h)`. `recurra.mixers.RNN` runs a cell over a sequence."""

from recurra.cells.cayley import Cayley
from recurra.cells.gru import Gates, GateWeights, GRUCell, RecurrentWeights
from recurra.cells.gru_sequence import gru_sequence, gru_sequence_reference
from recurra.cells.ncgru import NCGRUCell
from recurra.cells.neumann import Neumann, NeumannCayley
from recurra.cells.slstm_sequence import SLSTMParts, slstm_sequence, slstm_sequence_reference

__all__ = [
    "Cayley",
    "GRUCell",
    "GateWeights",
    "Gates",
    "NCGRUCell",
    "Neumann",
    "NeumannCayley",
    "RecurrentWeights",
    "SLSTMParts",
    "gru_sequence",
    "gru_sequence_reference",
    "slstm_sequence",
    "slstm_sequence_reference",
]
