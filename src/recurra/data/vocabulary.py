"""Word-level vocabularies: each word of the training text is a token, and every line ends with <eos>."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import index
from pathlib import Path
from typing import SupportsIndex

import numpy as np

from recurra.checks import kind_of, require, sentence
from recurra.files.digests import text_sha256
from recurra.files.reading import parse_json, read_text
from recurra.files.writing import replacing

EOS = "<eos>"
UNK = "<unk>"
_FORMAT = "recurra vocabulary 1"
_MOST_BYTES = 256 * 2**20
_OWN_FILE = "a file written by Vocabulary.save"


class Vocabulary:
    """Words and their tokens.

    Text is split at white space. Each line feed is the word <eos>, and a word outside the vocabulary is <unk>. This is
    how published perplexities on PTB and WikiText-103 count words.

    words: the word of each token; distinct, without white space, and with <eos> and <unk> among them.

    Raises ValueError for any other `words`.

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
        for word in () if _are_words(self.words) else self.words:
            is_word = isinstance(word, str) and word.split() == [word] and _can_be_written(word)
            require(is_word, "an entry of words", word, "a string that is not empty and has no white space")
        self._numbers = {word: number for number, word in enumerate(self.words)}
        if len(self._numbers) != len(self.words):
            twice = next(word for word, count in Counter(self.words).items() if count > 1)
            raise ValueError(sentence("words", f"a list with {twice!r} more than once", "distinct words"))
        for word in (EOS, UNK):
            if word not in self._numbers:
                raise ValueError(sentence("words", f"a list without {word!r}", f"{EOS!r} and {UNK!r} among them"))
        self.eos = self._numbers[EOS]
        self.unk = self._numbers[UNK]

    @classmethod
    def from_text(cls, blocks: Iterable[str]) -> "Vocabulary":
        """Collect the words of a text in blocks of whole lines: by frequency, then in order of appearance.

        <eos> is counted at each line end. <unk> is counted like any other word if the text has it, and added at the end
        if not.
        """
        counts = count_words(blocks)
        counts.setdefault(EOS, 0)
        counts.setdefault(UNK, 0)
        return cls([word for word, _ in counts.most_common()])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Vocabulary":
        """Read what `save` wrote. Raises OSError, or ValueError if the file is something else or damaged."""
        path = Path(path).expanduser()
        return cls.from_json(read_text(path, most_bytes=_MOST_BYTES), str(path))

    @classmethod
    def from_json(cls, text: str, name: str) -> "Vocabulary":
        """Read what `to_json` returned; `name` is what messages call it. Raises ValueError as `load`."""
        content = parse_json(text, name)
        if content.get("format") != _FORMAT:
            raise ValueError(sentence(name, "not a vocabulary", _OWN_FILE))
        words = content.get("words")
        if not isinstance(words, list):
            raise ValueError(sentence(name, f"a damaged vocabulary (words is {kind_of(words)})", _OWN_FILE))
        try:
            vocabulary = cls(words)
        except ValueError as error:
            raise ValueError(sentence(name, f"a damaged vocabulary ({error})", _OWN_FILE)) from error
        if vocabulary.fingerprint != content.get("fingerprint"):
            got = "a damaged vocabulary (its words do not match its fingerprint)"
            raise ValueError(sentence(name, got, _OWN_FILE))
        return vocabulary

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the words as JSON, whole or not at all. Raises OSError."""
        with replacing(Path(path).expanduser()) as file:
            file.write(self.to_json().encode())

    def to_json(self) -> str:
        """Return what `save` writes, as text."""
        # json.dumps with indent=0, which is not written in C and takes ten times as long
        words = json.dumps(self.words, ensure_ascii=False, separators=(",\n", ":"))
        return f'{{\n"format": "{_FORMAT}",\n"fingerprint": "{self.fingerprint}",\n"words": [\n{words[1:-1]}\n]\n}}'

    def __len__(self) -> int:
        return len(self.words)

    @property
    def fingerprint(self) -> str:
        """A digest of the words and their order, in hexadecimal: equal vocabularies have equal digests."""
        return text_sha256("\n".join(self.words))

    def encode(self, text: str) -> np.ndarray:
        """Turn text into tokens: (n,) int64."""
        words = _split(text)
        return np.fromiter(map(self._numbers.get, words, repeat(self.unk)), np.int64, len(words))

    def decode(self, tokens: Iterable[SupportsIndex]) -> str:
        """Turn tokens back into text: words with a space between them, and a line feed for each <eos>.

        `encode(decode(tokens))` returns the same tokens. Raises ValueError for a token outside the vocabulary.
        """
        words = []
        for number in map(index, tokens):
            require(0 <= number < len(self.words), "a token", number, f"0 to {len(self.words) - 1}")
            words.append("\n" if number == self.eos else self.words[number])
        return " ".join(words).replace(" \n", "\n").replace("\n ", "\n")


def _can_be_written(word: str) -> bool:
    """Whether a word is Unicode text: a lone surrogate, which JSON can spell, is not."""
    return word.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in word)


def _are_words(words: tuple[object, ...]) -> bool:
    """Whether all of them certainly are words: quick, for the vocabularies that are as they should be."""
    if not all(isinstance(word, str) for word in words):
        return False
    text = " ".join(map(str, words))
    return tuple(text.split()) == words and _can_be_written(text)


def _split(text: str) -> list[str]:
    """Split text into words, with <eos> for each line feed."""
    return text.replace("\n", f" {EOS} ").split()


def count_words(blocks: Iterable[str]) -> Counter[str]:
    """Count the words of a text in blocks of whole lines, <eos> at each line end, in order of appearance."""
    counts: Counter[str] = Counter()
    for block in blocks:
        counts.update(_split(block))
    return counts
