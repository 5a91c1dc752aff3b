"""How a stream is continued: settings, and the choice of one token after the other."""

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from recurra.checks import require, require_whole_number, sentence
from recurra.generation.choosing import RowChoice, choose
from recurra.generation.sampling import SamplingConfig


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How one stream is continued; the default draws from the model's own probabilities without end.

    Raises:
        TypeError: `max_tokens` or one of `stop_tokens` is not a whole number.
        ValueError: `max_tokens` is below 1, or `stop` is one text.
    """

    max_tokens: int | None = None
    """Maximum number of tokens; None for a stream without end."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How each token is chosen."""
    seed: int | torch.Generator = 0
    """Seed of the choices, or a generator on the CPU to draw from. Equal streams, settings and seeds give equal
    tokens."""
    stop_tokens: Collection[int] = ()
    """Tokens to end after; the one that ends the stream is given out too."""
    stop: Sequence[str] = ()
    """Texts to end at, for generated text only: the first to appear is left out. The stream has read it."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            require_whole_number(1, max_tokens=self.max_tokens)
        try:
            stop_tokens = tuple(map(operator.index, self.stop_tokens))
        except TypeError:
            raise TypeError(sentence("stop_tokens", repr(self.stop_tokens), "a collection of whole numbers")) from None
        alone = isinstance(self.stop, str)
        require(not alone, "stop", self.stop, "texts in a list", "a text alone would be its letters")
        # as they were read: an iterator is empty now
        object.__setattr__(self, "stop_tokens", stop_tokens)
        object.__setattr__(self, "stop", tuple(self.stop))


class Generation:
    """The choices of one stream that is being continued.

    Args:
        config: how to continue it.
    """

    def __init__(self, config: GenerationConfig) -> None:
        self.config, self.n_tokens, self.is_over = config, 0, False
        seed = config.seed
        self.generator = seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
        self._stop_tokens = frozenset(config.stop_tokens)

    @property
    def n_left(self) -> int | None:
        """How many tokens are left to choose; None without end."""
        return None if self.config.max_tokens is None else self.config.max_tokens - self.n_tokens

    def choose(self, logits: Float[Tensor, " V"], recent: Sequence[int]) -> int:
        """Choose the next token; `is_over` tells whether it is the last.

        Args:
            logits: after the stream's last token.
            recent: the stream's last tokens.

        Raises:
            ValueError: there is no token to choose (see `draw`).
        """
        (token,) = choose_all([self], logits[None], [recent])
        return token

    def row(self, recent: Sequence[int]) -> RowChoice:
        """How the next token is chosen after these, for `recurra.generation.choosing.choose`."""
        return RowChoice(self.config.sampling, self.generator, recent)

    def count(self, token: int) -> None:
        """Count a token that was chosen; `is_over` tells whether it is the last."""
        self.n_tokens += 1
        self.is_over = token in self._stop_tokens or self.n_left == 0


def choose_all(
    generations: Sequence[Generation], logits: Float[Tensor, "B V"], recent: Sequence[Sequence[int]]
) -> list[int]:
    """Choose the next token of several streams, and count it; arguments and errors as `Generation.choose`."""
    tokens = choose(logits, [one.row(tokens) for one, tokens in zip(generations, recent)])
    for generation, token in zip(generations, tokens):
        if isinstance(token, ValueError):
            raise token
        generation.count(token)
    return cast(list[int], tokens)
