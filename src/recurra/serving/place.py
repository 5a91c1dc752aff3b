"""Where a stream stands between two turns: the model's state, and the last token, which it has not read yet.

The logits after the last token are not kept: for a large vocabulary they take several times the bytes of the state.
The next step reads the last token and gives them again.
"""

from typing import Any, NamedTuple

from recurra.generation.sampling import RECENT_TOKENS


class Place(NamedTuple):
    """A place in a stream; a value that never changes, so that streams can share it.

    state: the model's state before the last token, of batch 1.
    recent: the last tokens, oldest first, at most `RECENT_TOKENS`; the last of them is the one that is not read yet.
    n_tokens: how many tokens the stream has, the last one included.
    """

    state: Any
    recent: tuple[int, ...] = ()
    n_tokens: int = 0

    @property
    def unread(self) -> tuple[int, ...]:
        """The last token; nothing at the start of a stream."""
        return self.recent[-1:]

    def after(self, tokens: list[int], state: Any) -> "Place":
        """Give the place after `tokens`, where `state` has read all of them but the last."""
        recent = (*self.recent, *tokens[-RECENT_TOKENS:])[-RECENT_TOKENS:]
        return Place(state, recent, self.n_tokens + len(tokens))
