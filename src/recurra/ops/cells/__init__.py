"""Cells: one step of a non-linear recurrence, `h = cell(x, h)`. `recurra.mixers.rnn.RNN` runs a cell over a
sequence.
"""

from recurra.ops.cells.gru import Gates, GateWeights, GRUCell, RecurrentWeights, gru_sequence, gru_sequence_reference
from recurra.ops.cells.orthogonal import Cayley, NCGRUCell, Neumann, NeumannCayley
from recurra.ops.cells.slstm import SLSTMParts, slstm_sequence, slstm_sequence_reference

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
