"""Numbers for the words of long texts, by a kernel: several times as fast as looking up strings."""

from collections.abc import Iterable

import numpy as np

from recurra.data.word_kernels import number_words

_END = b" \0\0"  # so that the kernel can look three bytes ahead


class WordTable:
    """Words, numbered from 0 in the order in which they were first read.

    Words are what str.split makes of a text. words: those known from the start; distinct.
    """

    def __init__(self, words: Iterable[str] = ()) -> None:
        self._size = 0
        known = list(words)
        self._make_room(" ".join(known).encode("utf-8", "surrogatepass"), len(known))

    def __len__(self) -> int:
        return self._size

    @property
    def words(self) -> list[str]:
        """All words, by their numbers."""
        return self._letters[: self._begins[self._size]].tobytes().decode("utf-8", "surrogatepass").split()

    def add(self, text: str) -> np.ndarray:
        """Return the number of each word of a text, (n,) int32, adding those that are new."""
        data, start = _bytes_of(text), 0
        parts = []
        while True:
            numbers, self._size, start = self._number(data, start, -1)
            parts.append(numbers)
            if start >= len(data) - 2:
                return parts[0] if len(parts) == 1 else np.concatenate(parts)
            self._make_room(self._letters[: self._begins[self._size]].tobytes(), self._size, len(data))

    def find(self, text: str, unknown: int) -> np.ndarray:
        """Return the number of each word of a text, (n,) int32, and `unknown` for words that the table lacks.

        It changes nothing, so several threads may call it at once.
        """
        return self._number(_bytes_of(text), 0, unknown)[0]

    def _number(self, data: np.ndarray, start: int, unknown: int) -> tuple[np.ndarray, int, int]:
        numbers = np.empty((len(data) - start) // 2 + 1, dtype=np.int32)  # a word and white space take 2 bytes
        state = numbers, self._table, self._letters, self._begins, self._size
        written, size, end, _ = number_words(data, start, *state, unknown)
        return numbers[:written], int(size), int(end)

    def _make_room(self, letters: bytes, n_words: int, more: int = 0) -> None:
        """Number the words of `letters` anew in a table with room for at least twice as many."""
        slots = 2 ** max(16, 2 + n_words.bit_length())
        self._table: np.ndarray = np.zeros(slots, dtype=np.uint64)
        self._letters: np.ndarray = np.empty(4 * len(letters) + 2 * more + 2**20, dtype=np.uint8)
        self._begins: np.ndarray = np.zeros(slots // 2 + 1, dtype=np.int64)
        self._size = 0
        _, self._size, _ = self._number(np.frombuffer(letters + _END, dtype=np.uint8), 0, -1)


def _bytes_of(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-8", "surrogatepass") + _END, dtype=np.uint8)
