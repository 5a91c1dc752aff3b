"""What a Compact Recurrent Transformer carries between segments, and what orders its tokens (CRT section 3)."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurra.cells import GRUCell, NCGRUCell, RecurrentWeights
from recurra.mixers.rnn import RNN, RNNState

CELLS: dict[str, type[GRUCell]] = {"gru": GRUCell, "ncgru": NCGRUCell}
"""The recurrent cells by name."""


class NoMemory(nn.Module):
    """Nothing is carried between segments: the Transformer of the paper's tables."""

    n_tokens = 0

    def start(self, x: Float[Tensor, "B L d"]) -> Float[Tensor, "B 0"]:
        """Return the memory at the start of a stream: none."""
        return x.new_zeros((x.shape[0], 0), dtype=torch.promote_types(x.dtype, torch.float32))

    def tokens(self, memory: Float[Tensor, "B 0"], x: Float[Tensor, "B L d"]) -> Float[Tensor, "B 0 d"]:
        """Return the tokens that the memory adds in front of a segment: none."""
        return x[:, :0]

    def weights(self) -> None:
        """Return what the calls of `read` share: nothing."""

    def read(
        self, y: Float[Tensor, "B L d"], memory: Float[Tensor, "B 0"], weights: RecurrentWeights | None = None
    ) -> Float[Tensor, "B 0"]:
        """Return the memory after a segment's outputs: none."""
        return memory


class RNNMemory(nn.Module):
    """One vector m: a token in front of each segment. An RNN reads the outputs from m on; its last state is the next.

    Args:
        cell: the recurrent cell, d_model to d_model.
    """

    n_tokens = 1

    def __init__(self, cell: GRUCell) -> None:
        super().__init__()
        self.rnn = RNN(cell)

    def start(self, x: Float[Tensor, "B L d"]) -> Float[Tensor, "B d"]:
        """Return the memory at the start of a stream: zeros, float32 or better."""
        return x.new_zeros((x.shape[0], x.shape[2]), dtype=torch.promote_types(x.dtype, torch.float32))

    def tokens(self, memory: Float[Tensor, "B d"], x: Float[Tensor, "B L d"]) -> Float[Tensor, "B 1 d"]:
        """Return the token that stands in front of a segment, in x's dtype."""
        return memory[:, None].to(x.dtype)

    def weights(self) -> RecurrentWeights:
        """Return what the calls of `read` share."""
        return self.rnn.cell.recurrent_weights()

    def read(
        self, y: Float[Tensor, "B L d"], memory: Float[Tensor, "B d"], weights: RecurrentWeights | None = None
    ) -> Float[Tensor, "B d"]:
        """Return the memory after the outputs y, continuing from the memory before them."""
        return self.rnn(y, RNNState(memory), weights=weights)[1].h


class RelativePosition(nn.Module):
    """The tokens as they are: relative attention knows their order."""

    def start(self, memory: Float[Tensor, "B m"]) -> Float[Tensor, "B 0"]:
        """Return the state at the start of a segment: none."""
        return memory[:, :0]

    def weights(self) -> None:
        """Return what calls share: nothing."""

    def forward(
        self, x: Float[Tensor, "B L d"], state: Float[Tensor, "B 0"], weights: RecurrentWeights | None = None
    ) -> tuple[Float[Tensor, "B L d"], Float[Tensor, "B 0"]]:
        """Return x."""
        return x, state


class RNNPosition(nn.Module):
    """The outputs of an RNN over the segment replace the tokens: the RNN gives them their order.

    It starts from the memory, so it ties memory and tokens together (our reading of "integrate the memory token of
    the previous segment with the tokens of the new segments"). Without a memory it starts from zeros.

    Args:
        cell: the recurrent cell, d_model to d_model.
    """

    def __init__(self, cell: GRUCell) -> None:
        super().__init__()
        self.rnn = RNN(cell)

    def start(self, memory: Float[Tensor, "B m"]) -> Float[Tensor, "B d"]:
        """Return the RNN's state at the start of a segment."""
        return memory if memory.shape[1] else memory.new_zeros(memory.shape[0], self.rnn.cell.hidden_size)

    def weights(self) -> RecurrentWeights:
        """Return what calls share."""
        return self.rnn.cell.recurrent_weights()

    def forward(
        self, x: Float[Tensor, "B L d"], state: Float[Tensor, "B d"], weights: RecurrentWeights | None = None
    ) -> tuple[Float[Tensor, "B L d"], Float[Tensor, "B d"]]:
        """Return E for the embeddings x, continuing from the RNN's state in the open segment."""
        e, last = self.rnn(x, RNNState(state), weights=weights)
        return e, last.h


class RNNPositionFromZero(RNNPosition):
    """The variant whose RNN starts every segment from zeros."""

    def start(self, memory: Float[Tensor, "B m"]) -> Float[Tensor, "B d"]:
        """Return zeros."""
        return memory.new_zeros(memory.shape[0], self.rnn.cell.hidden_size)


POSITION_STARTS: dict[str, type[RNNPosition]] = {"memory": RNNPosition, "zero": RNNPositionFromZero}
"""Where the position RNN starts a segment."""
MEMORIES = ("none", *CELLS)
POSITIONS = ("relative", *(f"rnn-{name}" for name in CELLS))


def make_memory(name: str, d_model: int) -> NoMemory | RNNMemory:
    """Make the memory by its name in `MEMORIES`."""
    return NoMemory() if name == "none" else RNNMemory(CELLS[name](d_model, d_model))


def make_position(name: str, start: str, d_model: int) -> RelativePosition | RNNPosition:
    """Make what gives the tokens their order, by its name in `POSITIONS` and `POSITION_STARTS`."""
    if name == "relative":
        return RelativePosition()
    return POSITION_STARTS[start](CELLS[name.removeprefix("rnn-")](d_model, d_model))
