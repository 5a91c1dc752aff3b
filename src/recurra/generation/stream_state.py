"""A stream at one moment: one value that never changes, so streams can share it and a snapshot is the value itself."""

from typing import Any, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from recurra.generation.sampling import RECENT_TOKENS


class StreamState(NamedTuple):
    """Everything that a stream's next step depends on; the default is the start of a stream.

    model_state: the model's state, of batch 1.
    logits: after the last token; None at the start.
    recent: the last tokens, oldest first, at most `RECENT_TOKENS`.
    position: how many tokens the stream has read.
    """

    model_state: Any = None
    logits: Float[Tensor, " V"] | None = None
    recent: tuple[int, ...] = ()
    position: int = 0

    def after(self, tokens: Int[Tensor, " L"], logits: Float[Tensor, " V"], model_state: Any) -> "StreamState":
        """Give the stream after it has read `tokens`, at least one, which led to `logits` and `model_state`."""
        recent = (*self.recent, *tokens[-RECENT_TOKENS:].tolist())[-RECENT_TOKENS:]
        return StreamState(model_state, logits, recent, self.position + len(tokens))
