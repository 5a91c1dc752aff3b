"""Word-level vocabularies: every word of the training text has a number, and every line ends with <eos>."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import index
from pathlib import Path
from typing import SupportsIndex

import numpy as np

from recurra.data.files import replacing

EOS = "<eos>"
UNK = "<unk>"
_FORMAT = "recurra vocabulary 1"


class Vocabulary:
    """Words and their numbers.

    Text is cut at white space; each line feed is the word <eos>, and a word that is not in the vocabulary is
    <unk>. So PTB and WikiText-103 are counted as their published perplexities count them.

    words: the word of each number; distinct, none with white space in it, <eos> and <unk> among them.

    Raises ValueError where `words` is not so.

    >>> vocabulary = Vocabulary.from_text(["a cat and a dog\\n"])
    >>> vocabulary.words
    ('a', 'cat', 'and', 'dog', '<eos>', '<unk>')
    >>> vocabulary.encode("a bird\\n").tolist()
    [0, 5, 4]
    >>> vocabulary.decode([0, 3, 4])
    'a dog\\n'
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        self._numbers = {word: number for number, word in enumerate(self.words)}
        if len(self._numbers) != len(self.words):
            twice = next(word for word, count in Counter(self.words).items() if count > 1)
            raise ValueError(f"words must be distinct, got {twice!r} more than once")
        for word in self.words:
            if not isinstance(word, str) or word.split() != [word]:
                raise ValueError(f"words must be non-empty strings without white space, got {word!r}")
        for word in (EOS, UNK):
            if word not in self._numbers:
                raise ValueError(f"words must hold {word!r}, and they do not")
        self.eos = self._numbers[EOS]
        self.unk = self._numbers[UNK]

    @classmethod
    def from_text(cls, blocks: Iterable[str]) -> "Vocabulary":
        """The words of a text in blocks of whole lines, the most frequent first, then in order of appearance.

        <eos> is counted at each line end. <unk> is counted like any word where the text has it, and is added
        at the end where it has not.
        """
        counts: Counter[str] = Counter()
        for block in blocks:
            counts.update(_split(block))
        counts.setdefault(EOS, 0)
        counts.setdefault(UNK, 0)
        return cls([word for word, _ in counts.most_common()])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Vocabulary":
        """Read what `save` wrote. Raises OSError, and ValueError where the file is foreign or damaged."""
        path = Path(path).expanduser()
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not a vocabulary: {error}") from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f"{path} is not a vocabulary written by Vocabulary.save")
        try:
            vocabulary = cls(content["words"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds a damaged vocabulary: {error}") from error
        if vocabulary.fingerprint != content.get("fingerprint"):
            raise ValueError(f"{path} holds a damaged vocabulary: its words do not match its fingerprint")
        return vocabulary

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the words as JSON; the file is there whole or not at all. Raises OSError."""
        with replacing(Path(path).expanduser()) as file:
            file.write(self.to_json().encode())

    def to_json(self) -> str:
        """What `save` writes, as text."""
        content = {"format": _FORMAT, "fingerprint": self.fingerprint, "words": self.words}
        return json.dumps(content, ensure_ascii=False, indent=0)

    def __len__(self) -> int:
        return len(self.words)

    @property
    def fingerprint(self) -> str:
        """A digest of the words and their order, in hexadecimal: equal vocabularies have equal ones."""
        return hashlib.sha256("\n".join(self.words).encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """The numbers of a text: (n,) int64."""
        words = _split(text)
        unk = self.unk
        get = self._numbers.get
        return np.fromiter((get(word, unk) for word in words), dtype=np.int64, count=len(words))

    def decode(self, tokens: Iterable[SupportsIndex]) -> str:
        """The words with a space between them, and a line feed for <eos>.

        `encode(decode(tokens))` gives the tokens back. Raises ValueError for a number outside the vocabulary.
        """
        words = []
        for number in map(index, tokens):
            if not 0 <= number < len(self.words):
                raise ValueError(f"tokens must lie in 0..{len(self.words) - 1}, got {number}")
            words.append("\n" if number == self.eos else self.words[number])
        return " ".join(words).replace(" \n", "\n").replace("\n ", "\n")


def _split(text: str) -> list[str]:
    return text.replace("\n", f" {EOS} ").split()
