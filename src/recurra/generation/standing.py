"""Where a stream stands: one value, never changed, so that streams may share it and a snapshot is the value itself."""

from typing import Any, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from recurra.generation.sampling import RECENT_TOKENS


class Standing(NamedTuple):
    """Everything that the next step of a stream depends on; the default is the start of a stream.

    state: the model's, of batch 1.
    logits: after the last token; None at the start.
    recent: the last tokens, oldest first, at most `RECENT_TOKENS`.
    position: how many tokens were read.
    """

    state: Any = None
    logits: Float[Tensor, " V"] | None = None
    recent: tuple[int, ...] = ()
    position: int = 0

    def after(self, tokens: Int[Tensor, " L"], logits: Float[Tensor, " V"], state: Any) -> "Standing":
        """Where the stream stands once it has read `tokens`, at least one, which gave `logits` and `state`."""
        recent = (*self.recent, *tokens[-RECENT_TOKENS:].tolist())[-RECENT_TOKENS:]
        return Standing(state, logits, recent, self.position + len(tokens))
