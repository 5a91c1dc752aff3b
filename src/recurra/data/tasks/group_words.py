"""Word problems of permutation groups: after every element, the product of all so far.

S5 and A5 are not solvable, so that no fixed number of layers with diagonal transitions can track them at every length
(Merrill, Petty and Sabharwal, "The illusion of state in state-space models", 2024). S3 is solvable.
"""

from functools import cache
from itertools import permutations

import numpy as np
from jaxtyping import Int

GROUPS = {"s3": (3, False), "a5": (5, True), "s5": (5, False)}
"""Name -> number of letters, and whether only even permutations belong to the group."""


def group_words(
    random: np.random.Generator, batch_size: int, length: int, *, group: str
) -> tuple[Int[np.ndarray, "B L"], Int[np.ndarray, "B L"]]:
    """Draw words over all elements of a group, and the product of every beginning of them.

    Args:
        random: the source of chance.
        batch_size: the number of words.
        length: elements of a word.
        group: a key of `GROUPS`.
    """
    table = multiplication_table(group)
    words = random.integers(0, len(table), (batch_size, length))
    products = np.empty_like(words)
    product = np.zeros(batch_size, dtype=np.int64)  # the identity comes first
    for step in range(length):
        product = table[words[:, step], product]
        products[:, step] = product
    return words, products


@cache
def multiplication_table(group: str) -> Int[np.ndarray, "n n"]:
    """Return the number of the product f g (first g, then f) at [f, g]; elements are numbered in lexical order."""
    n_letters, even_only = GROUPS[group]
    elements = [p for p in permutations(range(n_letters)) if not (even_only and _is_odd(p))]
    numbers = {element: number for number, element in enumerate(elements)}
    table = [[numbers[tuple(f[letter] for letter in g)] for g in elements] for f in elements]
    return np.array(table)


def _is_odd(permutation: tuple[int, ...]) -> bool:
    pairs = ((i, j) for j in range(len(permutation)) for i in range(j))
    return sum(permutation[i] > permutation[j] for i, j in pairs) % 2 == 1
