"""The memory that a compact recurrent vision Transformer carries from segment to segment (CRT section 3)."""

from jaxtyping import Float
from torch import Tensor, nn

from recurra.cells import GRUCell
from recurra.mixers.rnn import RNN, RNNState


class PatchMemory(nn.Module):
    """One vector per patch position: the state of an RNN that reads the outputs at that position frame by frame.

    The paper does not give the number of vectors. One per position is our reading: the memory joins time attention,
    which runs separately at each patch position. All positions share the RNN's weights.

    Args:
        cell: the recurrent cell, d_model to d_model.
        n_patches: patch positions.
    """

    def __init__(self, cell: GRUCell, n_patches: int) -> None:
        super().__init__()
        self.n_patches = n_patches
        self.rnn = RNN(cell)

    @property
    def n_vectors(self) -> int:
        """The number of vectors."""
        return self.n_patches

    def start(self, batch: int, like: Tensor) -> Float[Tensor, "B M d"]:
        """Return the memory at the start of `batch` streams: zeros, with the dtype and the device of `like`."""
        return like.new_zeros(batch, self.n_vectors, self.rnn.cell.hidden_size)

    def tokens(self, memory: Float[Tensor, "B M d"]) -> Float[Tensor, "B P d"]:
        """Return the token that joins time attention at each patch position."""
        return memory

    def read(self, y: Float[Tensor, "B P T d"], memory: Float[Tensor, "B M d"]) -> Float[Tensor, "B M d"]:
        """Return the memory after the outputs y of a segment, starting from the memory before it."""
        return self.rnn(y.flatten(0, 1), RNNState(memory.flatten(0, 1)))[1].h.unflatten(0, memory.shape[:2])


class PooledMemory(PatchMemory):
    """A single vector: the RNN reads the mean over the patches, and every position sees the vector."""

    @property
    def n_vectors(self) -> int:
        """One vector."""
        return 1

    def tokens(self, memory: Float[Tensor, "B M d"]) -> Float[Tensor, "B P d"]:
        """Return the vector to each patch position."""
        return memory.expand(-1, self.n_patches, -1)

    def read(self, y: Float[Tensor, "B P T d"], memory: Float[Tensor, "B M d"]) -> Float[Tensor, "B M d"]:
        """Return the memory after the outputs y of a segment, starting from the memory before it."""
        return super().read(y.mean(1, keepdim=True), memory)


PATCH_MEMORIES: dict[str, type[PatchMemory]] = {"per_patch": PatchMemory, "pooled": PooledMemory}
"""The kinds of memory by name."""
