"""The recurrent state where transformers keeps keys and values."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import Cache

from recurra.state import detach, n_streams, select


class RecurrentCache(Cache):
    """A batch of streams between two calls: a model's state, and the number of tokens it has read.

    The model replaces the state, because transformers' caches change in place. States themselves never change, so
    `copy.copy(cache)` is a free bookmark from which a text can be continued twice.

    The size does not grow with the tokens, and no token can be taken back: `crop` refuses to.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.state: Any = None
        """The model's state; None at the start of a stream."""
        self.n_tokens = 0
        """Tokens read so far, padding included: columns of `input_ids`."""

    def __bool__(self) -> bool:
        """True even if it is empty: transformers' own caches count their layers."""
        return True

    def __repr__(self) -> str:
        return f"RecurrentCache(n_tokens={self.n_tokens}, batch_size={self.batch_size})"

    def put(self, state: Any, n_tokens: int) -> None:
        """Take the state after `n_tokens` more."""
        self.state = state
        self.n_tokens += n_tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens that the streams have read, padding included."""
        return self.n_tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no end."""
        return -1

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether anything was read."""
        return self.state is not None

    @property
    def batch_size(self) -> int:
        """Number of streams; -1 until something is read."""
        count = None if self.state is None else n_streams(self.state)
        return -1 if count is None else count

    @property
    def is_compileable(self) -> bool:
        """No: a state is replaced, not written into."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether anything was read."""
        return self.state is not None

    @property
    def is_croppable(self) -> bool:
        """No."""
        return False

    def reorder_cache(self, beam_idx: Int[Tensor, " batch"]) -> None:
        """Let stream i continue from where stream beam_idx[i] is."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these streams, in this order."""
        self.state = select(self.state, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every stream `repeats` times in a row: for beams, or for several continuations of a prompt."""
        if self.state is not None:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def detach(self) -> None:
        """Cut the gradients that flow through the state."""
        self.state = detach(self.state)

    def reset(self) -> None:
        """Start new streams."""
        self.state, self.n_tokens = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to take tokens back; 0 changes nothing.

        Raises:
            NotImplementedError: `tokens_to_remove` is not 0.
        """
        if tokens_to_remove:
            raise NotImplementedError(
                "tokens_to_remove is not 0; expected 0, as a recurrent state cannot take tokens back: continue from a "
                "copy.copy(cache) made before them"
            )

    def update(self, *arguments: Any, **options: Any) -> Any:
        """Refuse keys and values: there are none.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("a RecurrentCache holds a state, not keys and values; use put")
