"""How often each word of a text is there, in order of appearance: by a kernel where the text is long."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain

import numpy as np

from recurra.data.text_files import joined
from recurra.data.vocabulary import LONG, has_kernels, with_ends


def count_words(blocks: Iterable[str]) -> dict[str, int]:
    """Count the words of a text in blocks of whole lines, <eos> at each line end, in order of appearance."""
    texts = joined(blocks, LONG, " ")
    first = next(texts, "")
    if len(first) < LONG or not has_kernels():
        counts: Counter[str] = Counter()
        for text in chain([first], texts):
            counts.update(with_ends(text).split())
        return counts
    from recurra.data.word_table import WordTable

    table, totals = WordTable(), np.zeros(0, dtype=np.int64)
    for text in chain([first], texts):
        found = np.bincount(table.add(with_ends(text)), minlength=len(table))
        totals = _sum(totals, found)
    return dict(zip(table.words, totals.tolist()))


def merged_counts(parts: Iterable[tuple[str, np.ndarray]]) -> dict[str, int]:
    """Add up counts, in order of appearance; each part is its words, with spaces between them, and their counts."""
    if not has_kernels():
        counts: Counter[str] = Counter()
        for words, numbers in parts:
            counts.update(dict(zip(words.split(), numbers.tolist())))
        return counts
    from recurra.data.word_table import WordTable

    table, totals = WordTable(), np.zeros(0, dtype=np.int64)
    for words, numbers in parts:
        places = table.add(words)
        part = np.zeros(len(table), dtype=np.int64)
        part[places] = numbers
        totals = _sum(totals, part)
    return dict(zip(table.words, totals.tolist()))


def _sum(less: np.ndarray, more: np.ndarray) -> np.ndarray:
    more[: len(less)] += less
    return more
