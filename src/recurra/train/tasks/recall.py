"""Recall from context: keys and values (MQAR), and induction heads."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from recurra.checks import fields_of, require, require_whole_number
from recurra.train.task import register_task
from recurra.train.tasks.generated import GeneratedConfig, GeneratedTask, Sequences


def _associative_recall(
    random: np.random.Generator,
    batch_size: int,
    length: int,
    *,
    n_pairs: int,
    vocab_size: int,
    power: float = 0.01,
    random_filler: bool = True,
) -> tuple[Int[np.ndarray, "B L"], Int[np.ndarray, "B L"]]:
    """Draw multi-query associative recall: n_pairs keys with their values, then every key once more."""
    require(length % 2 == 0, "length", length, "an even number of tokens")
    require(4 * n_pairs <= length, "n_pairs", n_pairs, f"at most {length // 4}, a quarter of the length")
    half = vocab_size // 2
    require(n_pairs < half, "n_pairs", n_pairs, f"fewer than {half}, the keys there are")
    keys = _distinct(random, batch_size, n_pairs, 1, half)
    values = _distinct(random, batch_size, n_pairs, half, vocab_size)
    tokens = np.zeros((batch_size, length), dtype=np.int64)
    targets = np.full_like(tokens, -1)
    tokens[:, 0 : 2 * n_pairs : 2], tokens[:, 1 : 2 * n_pairs : 2] = keys, values
    n_places = (length - 2 * n_pairs) // 2
    weights = power * np.arange(1, n_places + 1) ** (power - 1.0)
    # The n smallest of exponential variables with these rates are a draw without replacement with these weights.
    waits = random.exponential(size=(batch_size, n_places)) / weights
    places = 2 * n_pairs + 2 * np.argsort(waits, axis=1)[:, :n_pairs]
    rows = np.arange(batch_size)[:, None]
    filler = random.integers(0, vocab_size, tokens.shape)
    tokens[rows, places], targets[rows, places] = keys, values
    if random_filler:
        np.copyto(tokens, filler, where=tokens == 0)
    return tokens, targets


def _distinct(random: np.random.Generator, rows: int, n: int, low: int, high: int) -> Int[np.ndarray, "rows n"]:
    """Draw n different numbers of [low, high) for each row."""
    # not argpartition, whose order within the first n depends on the processor, and on the numbers
    return low + np.argsort(random.random((rows, high - low)), axis=1)[:, :n]


@dataclass(frozen=True, kw_only=True)
class RecallConfig(GeneratedConfig):
    """Multi-query associative recall, in the sizes of Arora et al., "Zoology" (2024)."""

    shortest: ClassVar[int] = 4

    n_pairs: int = 4
    """Pairs of a key and its value in each sequence."""
    vocabulary: int = 8192
    """Tokens: half of them for keys, half for values."""
    random_filler: bool = True
    """Whether the places between pairs and queries hold random tokens; false: token 0, as in the paper's figure 2."""
    min_length: int = 64
    max_length: int = 64
    eval_min_length: int = 64
    eval_max_length: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole_number(1, **fields_of(self, "data", "n_pairs"))
        require_whole_number(4, **fields_of(self, "data", "vocabulary"))
        for kind in ("", "eval_"):
            low, high = getattr(self, f"{kind}min_length"), getattr(self, f"{kind}max_length")
            require(
                low == high and low % 2 == 0, f"data.{kind}max_length", high, f"data.{kind}min_length, an even number"
            )
            most = f"at most {low // 4}, a quarter of data.{kind}min_length"
            require(4 * self.n_pairs <= low, "data.n_pairs", self.n_pairs, most)
        fits = self.n_pairs < self.vocabulary // 2  # the keys; one of them is the token between pairs
        require(fits, "data.n_pairs", self.n_pairs, "fewer than half of data.vocabulary")
        require(self.final_length is None, "data.final_length", self.final_length, "null: recall has one length")

    def make(self) -> Sequences:
        draw = partial(
            _associative_recall, n_pairs=self.n_pairs, vocab_size=self.vocabulary, random_filler=self.random_filler
        )
        return Sequences(draw, self.vocabulary, self.vocabulary, self.vocabulary - self.vocabulary // 2)


@register_task("recall")
class Recall(GeneratedTask):
    """Multi-query associative recall."""

    data = RecallConfig


# --- induction heads ---


def _induction(
    random: np.random.Generator, batch_size: int, length: int, *, vocab_size: int
) -> tuple[Int[np.ndarray, "B L"], Int[np.ndarray, " B"]]:
    """Draw the induction-heads task: a special token, and what comes after it the first time."""
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
        n_tokens = self.vocabulary + 1
        return Sequences(partial(_induction, vocab_size=self.vocabulary), n_tokens, n_tokens, self.vocabulary)


@register_task("induction")
class Induction(GeneratedTask):
    """Induction heads."""

    data = InductionConfig
