"""The recurrent state where transformers keeps keys and values."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import Cache

from recurra.checks import require, require_at_least
from recurra.state import detach, n_streams, select

ASSISTED = 256
"""How many tokens a cache can take back once transformers asks it to record the past, as assisted generation does."""


class Call(NamedTuple):
    """Tokens that were read in one call, and the state before them."""

    state: Any
    tokens: Int[Tensor, "B L"]
    mask: Bool[Tensor, "B L"] | None

    def followed_by(
        self, tokens: Int[Tensor, "B L"], mask: Bool[Tensor, "B L"] | None
    ) -> tuple[Int[Tensor, "B M"], Bool[Tensor, "B M"] | None]:
        """Put more tokens behind these, with their mask; no mask if all count."""
        both = torch.cat([self.tokens.to(tokens.device), tokens], 1)
        if self.mask is None and mask is None:
            return both, None
        parts = ((self.mask, self.tokens), (mask, tokens))
        masks = [torch.ones_like(of, dtype=torch.bool) if given is None else given for given, of in parts]
        return both, torch.cat(masks, 1)


class RecurrentCache(Cache):
    """A batch of streams between two calls: a model's state, and the number of tokens it has read.

    The model replaces the state, because transformers' caches change in place. States themselves never change, so
    `copy.copy(cache)` is a free bookmark from which a text can be continued twice.

    The size does not grow with the tokens. The last `keeps` tokens can be taken back by `crop`: the cache then has the
    states between the last calls. At the border of a call the state itself comes back; inside of a call, the state
    before it does, and the next call reads the tokens between (`again`) once more, with its own.

    Args:
        keeps: how many of the last tokens can be taken back, at least.

    Raises:
        ValueError: `keeps` is below 0.
    """

    def __init__(self, keeps: int = 0) -> None:
        super().__init__(layers=[])
        require_at_least(0, keeps=keeps)
        self.keeps = keeps
        """Number of last tokens that can be taken back, at least."""
        self.state: Any = None
        """The model's state before the tokens that are read again; None at the start of a stream."""
        self.n_tokens = 0
        """Tokens read so far, padding included: columns of `input_ids`."""
        self.again: Call | None = None
        """What the next call has to read again, from `state`; None unless a call was taken back in part."""
        self._calls: tuple[Call, ...] = ()  # the last calls, end to end, up to `state`

    def __bool__(self) -> bool:
        """True even if it is empty: transformers' own caches count their layers."""
        return True

    def __repr__(self) -> str:
        return f"RecurrentCache(n_tokens={self.n_tokens}, batch_size={self.batch_size})"

    def put(self, state: Any, tokens: Int[Tensor, "B L"], mask: Bool[Tensor, "B L"] | None = None) -> None:
        """Take the state after a call that read `tokens`, those to be read `again` in front of them if there are any.

        Args:
            state: what the call returned.
            tokens: what it read.
            mask: True where they count; None if all do.
        """
        n_again = 0 if self.again is None else self.again.tokens.shape[1]
        calls = [*self._calls, Call(self.state, tokens, mask)]
        n_kept = sum(call.tokens.shape[1] for call in calls)
        while calls and n_kept - calls[0].tokens.shape[1] >= self.keeps:
            n_kept -= calls.pop(0).tokens.shape[1]
        self.state, self.again, self._calls = state, None, tuple(calls)
        self.n_tokens += tokens.shape[1] - n_again

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens that the streams have read, padding included."""
        return self.n_tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no end."""
        return -1

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether anything was read."""
        return self.state is not None or self.again is not None

    @property
    def batch_size(self) -> int:
        """Number of streams; -1 until something is read."""
        count = n_streams((self.state, self.again))
        return -1 if count is None else count

    @property
    def is_compileable(self) -> bool:
        """No: a state is replaced, not written into."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether anything was read."""
        return self.state is not None or self.again is not None

    @property
    def is_croppable(self) -> bool:
        """Whether any token can be taken back."""
        return self.keeps > 0

    def activate_past_recording(self) -> None:
        """Let `crop` take back at least 256 tokens from here on; assisted generation asks for it."""
        self.keeps = max(self.keeps, ASSISTED)

    def reorder_cache(self, beam_idx: Int[Tensor, " batch"]) -> None:
        """Let stream i continue from where stream beam_idx[i] is."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these streams, in this order."""
        self.state = select(self.state, indices)
        self.again, self._calls = select(self.again, indices), select(self._calls, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every stream `repeats` times in a row: for beams, or for several continuations of a prompt."""
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def detach(self) -> None:
        """Cut the gradients that flow through the state."""
        self.state, self.again, self._calls = detach((self.state, self.again, self._calls))

    def reset(self) -> None:
        """Start new streams."""
        self.state, self.n_tokens, self.again, self._calls = None, 0, None, ()

    def crop(self, tokens_to_remove: int) -> None:
        """Take tokens back, so that the streams continue from before them.

        Args:
            tokens_to_remove: minus the number of last tokens, as in transformers; 0 changes nothing.

        Raises:
            ValueError: it is above 0, or more tokens than the cache keeps.
        """
        require(tokens_to_remove <= 0, "tokens_to_remove", tokens_to_remove, "0 or below: minus how many to take back")
        calls = [*self._calls, *([] if self.again is None else [self.again])]
        n_kept = sum(call.tokens.shape[1] for call in calls)
        most = f"{-n_kept} to 0" if n_kept else "0"
        mend = f"make it as RecurrentCache(keeps={-tokens_to_remove}), or continue from a copy.copy(cache) made before"
        fits = -tokens_to_remove <= n_kept
        require(fits, "tokens_to_remove", tokens_to_remove, f"{most}, as many tokens as this cache can take back", mend)
        left = -tokens_to_remove
        self.n_tokens -= left
        while left:
            state, tokens, mask = calls.pop()
            n_stay = max(0, tokens.shape[1] - left)
            left -= tokens.shape[1] - n_stay
            self.state, self.again = state, None
            if n_stay:
                self.again = Call(state, tokens[:, :n_stay], None if mask is None else mask[:, :n_stay])
        self._calls = tuple(calls) if tokens_to_remove else self._calls

    def update(self, *arguments: Any, **options: Any) -> Any:
        """Refuse keys and values: there are none.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("a RecurrentCache holds a state, not keys and values; use put")


def fitting_cache(cache: Cache | None, tokens: Int[Tensor, "B L"]) -> RecurrentCache | None:
    """Return a cache that `tokens` continue. Raises ValueError: it is of another kind, or of other streams."""
    if cache is None:
        return None
    if not isinstance(cache, RecurrentCache):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}; expected a recurra.huggingface.RecurrentCache, or None to "
            "start a new one"
        )
    if cache.batch_size not in (-1, len(tokens)):
        raise ValueError(
            f"past_key_values is of {cache.batch_size} streams and input_ids of {len(tokens)} rows; for several beams "
            "or continuations of each, use past_key_values.batch_repeat_interleave(n)"
        )
    return cache
