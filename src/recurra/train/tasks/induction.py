"""Induction heads: a special token, and what came after it the first time."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from recurra.checks import fields_of, require, require_whole_number
from recurra.train.task import register_task
from recurra.train.tasks.generated import GeneratedConfig, GeneratedTask, Sequences


def _induction(
    random: np.random.Generator, batch_size: int, length: int, *, vocab_size: int
) -> tuple[Int[np.ndarray, "B L"], Int[np.ndarray, " B"]]:
    """Draw the induction-heads task: a special token, and what comes after it the first time.

    As in Gu and Dao, "Mamba" (2023): the special token, `vocab_size`, stands at a random place and once more at the
    end, where the target is the token that followed it.

    Args:
        random: the source of chance.
        batch_size: the number of sequences.
        length: tokens of a sequence, at least 3.
        vocab_size: ordinary tokens; the special one has the number after them.
    """
    require(length >= 3, "length", length, "at least 3")
    tokens = random.integers(0, vocab_size, (batch_size, length))
    places = random.integers(0, length - 2, batch_size)
    rows = np.arange(batch_size)
    tokens[rows, places] = tokens[:, -1] = vocab_size
    return tokens, tokens[rows, places + 1]


@dataclass(frozen=True, kw_only=True)
class InductionConfig(GeneratedConfig):
    """Induction heads, in the sizes of Gu and Dao, "Mamba" (2023)."""

    shortest: ClassVar[int] = 3

    vocabulary: int = 16
    """Ordinary tokens; the special one comes besides."""
    min_length: int = 256
    max_length: int = 256
    eval_min_length: int = 256
    eval_max_length: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole_number(1, **fields_of(self, "data", "vocabulary"))

    def make(self) -> Sequences:
        """Return how to draw the sequences."""
        n_tokens = self.vocabulary + 1
        return Sequences(partial(_induction, vocab_size=self.vocabulary), n_tokens, n_tokens, self.vocabulary)


@register_task("induction")
class Induction(GeneratedTask):
    """Induction heads."""

    data = InductionConfig
