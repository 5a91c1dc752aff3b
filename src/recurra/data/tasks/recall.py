"""Recall from context: pairs of keys and values, whose keys come again (MQAR), and induction heads."""

import numpy as np
from jaxtyping import Int

from recurra.checks import require


def associative_recall(
    random: np.random.Generator,
    batch_size: int,
    length: int,
    *,
    n_pairs: int,
    vocab_size: int,
    power: float = 0.01,
    random_filler: bool = True,
) -> tuple[Int[np.ndarray, "B L"], Int[np.ndarray, "B L"]]:
    """Draw multi-query associative recall: n_pairs keys with their values, then every key once more.

    As in Arora et al., "Zoology: measuring and improving recall in efficient language models" (2024): keys are the
    lower half of the vocabulary without token 0, values the upper half. After the pairs every key stands once, at gaps
    that follow a power law, and its target is its value. The places between hold random tokens, or token 0, as in the
    paper's figure 2. All other targets are -1.

    Args:
        random: the source of chance.
        batch_size: the number of sequences.
        length: tokens of a sequence, even.
        n_pairs: pairs in each; at most a quarter of the length.
        vocab_size: tokens in all; more than twice n_pairs.
        power: the exponent of the gaps' law; small values put queries near the pairs.
        random_filler: whether the places between hold random tokens; if not, they hold token 0.

    Raises:
        ValueError: the length is odd or the pairs do not fit.
    """
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


def induction(
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


def _distinct(random: np.random.Generator, rows: int, n: int, low: int, high: int) -> Int[np.ndarray, "rows n"]:
    """Draw n different numbers of [low, high) for each row."""
    # not argpartition, whose order within the first n depends on the processor, and on the numbers
    return low + np.argsort(random.random((rows, high - low)), axis=1)[:, :n]
