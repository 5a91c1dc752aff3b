"""Problems: parity, modular arithmetic, words of groups; recall from context (MQAR), and induction heads.

Parity and arithmetic are those of Delétang et al., "Neural networks and the Chomsky hierarchy" (2023): a sequence is
read to its end, and the one target stands at its last token. Word problems of permutation groups have a target after
every element, the product of all so far. S5 and A5 are not solvable, so that no fixed number of layers with diagonal
transitions can track them at every length (Merrill, Petty and Sabharwal, "The illusion of state in state-space models",
2024). S3 is solvable.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import permutations
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from recurra.checks import choose, fields_of, require, require_whole_number
from recurra.train.task import register_task
from recurra.train.tasks.generated import GeneratedConfig, GeneratedTask, Sequences

_MODULUS = 5
PLUS, MINUS, TIMES, OPEN, CLOSE, EQUALS = range(_MODULUS, _MODULUS + 6)
"""Tokens of modular arithmetic; those below are the digits 0 to 4."""


def _parity(random: np.random.Generator, batch_size: int, length: int) -> tuple[np.ndarray, Int[np.ndarray, " B"]]:
    """Draw bits: (B, length), and whether the number of ones is odd."""
    bits = random.integers(0, 2, (batch_size, length))
    return bits, bits.sum(1) % 2


def _modular_arithmetic(
    random: np.random.Generator, batch_size: int, length: int
) -> tuple[np.ndarray, Int[np.ndarray, " B"]]:
    """Draw sums, differences and products without brackets, such as 3 + 1 * 4 - 2 =, and their values modulo 5."""
    n_digits = length // 2
    tokens = np.empty((batch_size, 2 * n_digits), dtype=np.int64)
    digits = tokens[:, ::2] = random.integers(0, _MODULUS, (batch_size, n_digits))
    operators = random.integers(PLUS, TIMES + 1, (batch_size, n_digits - 1))
    tokens[:, 1:-1:2], tokens[:, -1] = operators, EQUALS
    total, product = np.zeros(batch_size, dtype=np.int64), digits[:, 0]
    for number in range(n_digits - 1):
        operator, digit = operators[:, number], digits[:, number + 1]
        multiplied = operator == TIMES
        total = np.where(multiplied, total, total + product) % _MODULUS
        product = np.where(multiplied, product * digit, np.where(operator == PLUS, digit, -digit)) % _MODULUS
    return tokens, (total + product) % _MODULUS


def _bracketed_arithmetic(
    random: np.random.Generator, batch_size: int, length: int
) -> tuple[np.ndarray, Int[np.ndarray, " B"]]:
    """Draw sums, differences and products with brackets, such as ( 2 - ( - 1 ) ) =, and their values modulo 5."""
    tokens = np.empty((batch_size, length), dtype=np.int64)
    values = np.empty(batch_size, dtype=np.int64)
    for row in range(batch_size):
        expression, values[row] = _bracketed(random, length - 1)
        tokens[row, :-1], tokens[row, -1] = expression, EQUALS
    return tokens, values


def _bracketed(random: np.random.Generator, length: int) -> tuple[list[int], int]:
    """Draw an expression of exactly `length` tokens: d, - d, ( d ), ( - d ) or ( left operator right )."""
    tokens: list[int] = []
    values: list[int] = []
    todo: list[tuple[str, int]] = [("expression", length)]
    while todo:
        kind, argument = todo.pop()
        if kind == "expression":
            todo += _parts(random, argument)[::-1]
        elif kind == "write":
            tokens.append(argument)
            if argument < _MODULUS:
                values.append(argument)
        elif kind == "negate":
            values.append(-values.pop() % _MODULUS)
        else:
            right, left = values.pop(), values.pop()
            values.append({PLUS: left + right, MINUS: left - right, TIMES: left * right}[argument] % _MODULUS)
    return tokens, values.pop()


def _parts(random: np.random.Generator, length: int) -> list[tuple[str, int]]:
    """What an expression of this length consists of, in order."""
    digit = ("write", int(random.integers(0, _MODULUS)))
    if length <= 4:
        signed = [("write", MINUS), digit, ("negate", 0)] if length % 2 == 0 else [digit]
        return [("write", OPEN), *signed, ("write", CLOSE)] if length > 2 else signed
    left, operator = int(random.integers(1, length - 3)), int(random.integers(PLUS, TIMES + 1))
    terms = [("expression", left), ("write", operator), ("expression", length - 3 - left)]
    return [("write", OPEN), *terms, ("write", CLOSE), ("combine", operator)]


_GROUPS = {"s3": (3, False), "a5": (5, True), "s5": (5, False)}
"""Name -> number of letters, and whether only even permutations belong to the group."""


def _group_words(
    random: np.random.Generator, batch_size: int, length: int, *, group: str
) -> tuple[Int[np.ndarray, "B L"], Int[np.ndarray, "B L"]]:
    """Draw words over all elements of a group, and the product of every beginning of them."""
    table = _multiplication_table(group)
    words = random.integers(0, len(table), (batch_size, length))
    products = np.empty_like(words)
    product = np.zeros(batch_size, dtype=np.int64)  # the identity comes first
    for step in range(length):
        product = table[words[:, step], product]
        products[:, step] = product
    return words, products


@cache
def _multiplication_table(group: str) -> Int[np.ndarray, "n n"]:
    """Return the number of the product f g (first g, then f) at [f, g]; elements are numbered in lexical order."""
    n_letters, even_only = _GROUPS[group]
    elements = [p for p in permutations(range(n_letters)) if not (even_only and _is_odd(p))]
    numbers = {element: number for number, element in enumerate(elements)}
    table = [[numbers[tuple(f[letter] for letter in g)] for g in elements] for f in elements]
    return np.array(table)


def _is_odd(permutation: tuple[int, ...]) -> bool:
    pairs = ((i, j) for j in range(len(permutation)) for i in range(j))
    return sum(permutation[i] > permutation[j] for i, j in pairs) % 2 == 1


_STATE_TRACKING: Mapping[str, Sequences] = {
    "parity": Sequences(_parity, 2, 2, 2),
    "modular-arithmetic": Sequences(_modular_arithmetic, EQUALS + 1, _MODULUS, _MODULUS),
    "bracketed-arithmetic": Sequences(_bracketed_arithmetic, EQUALS + 1, _MODULUS, _MODULUS),
    **{
        f"words-{group}": Sequences(partial(_group_words, group=group), *[len(_multiplication_table(group))] * 3)
        for group in _GROUPS
    },
}


@dataclass(frozen=True, kw_only=True)
class StateTrackingConfig(GeneratedConfig):
    """Parity, modular arithmetic and word problems, with a curriculum of lengths and longer sequences in the test.

    The lengths are those of Grazzi et al., "Unlocking state-tracking in linear RNNs through negative eigenvalues".
    """

    shortest: ClassVar[int] = 2

    task: str = "parity"
    """One of `STATE_TRACKING`."""
    min_length: int = 3
    max_length: int = 40
    eval_min_length: int = 40
    eval_max_length: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        self.make()

    def make(self) -> Sequences:
        return choose("data.task", _STATE_TRACKING, self.task)


@register_task("state-tracking")
class StateTracking(GeneratedTask):
    """Parity, modular arithmetic and word problems."""

    data = StateTrackingConfig


# --- recall from context ---


def _associative_recall(
    random: np.random.Generator,
    batch_size: int,
    length: int,
    *,
    n_pairs: int,
    vocab_size: int,
    random_filler: bool = True,
) -> tuple[Int[np.ndarray, "B L"], Int[np.ndarray, "B L"]]:
    """Draw multi-query associative recall: n_pairs keys with their values, then every key once more."""
    half = vocab_size // 2
    keys = _distinct(random, batch_size, n_pairs, 1, half)
    values = _distinct(random, batch_size, n_pairs, half, vocab_size)
    tokens = np.zeros((batch_size, length), dtype=np.int64)
    targets = np.full_like(tokens, -1)
    tokens[:, 0 : 2 * n_pairs : 2], tokens[:, 1 : 2 * n_pairs : 2] = keys, values
    n_places = (length - 2 * n_pairs) // 2
    weights = 0.01 * np.arange(1, n_places + 1) ** (0.01 - 1.0)
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
    """Fill the positions between pairs and queries with random tokens; false: token 0, as in the paper's figure 2."""
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
            fits = low == high and low % 2 == 0
            require(fits, f"data.{kind}max_length", high, f"data.{kind}min_length, an even number")
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


def _induction(
    random: np.random.Generator, batch_size: int, length: int, *, vocab_size: int
) -> tuple[Int[np.ndarray, "B L"], Int[np.ndarray, " B"]]:
    """Draw the induction-heads task: a special token, and what comes after it the first time."""
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
    """Number of ordinary tokens, not counting the special one."""
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
