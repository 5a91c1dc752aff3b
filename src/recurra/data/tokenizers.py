"""What turns text into tokens and back: bytes, words, and the byte pairs of the `tokenizers` library."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from recurra._files.digests import STAMP, checked_stamp, stamped, text_sha256
from recurra._files.reading import one_line, parse_json, read_text
from recurra._files.writing import replacing
from recurra.checks import kind_of, require, require_whole_number, sentence

_Own = TypeVar("_Own", bound="_Encoder")


class _Encoder:
    """What the encoders share: many texts at once, and a file of JSON."""

    def encode(self, text: str) -> np.ndarray:
        raise NotImplementedError

    def encode_each(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode each text by itself. Return all tokens, one text after the other, and how many each text has."""
        encoded = [self.encode(text) for text in texts]
        lengths = np.array([len(tokens) for tokens in encoded], np.int64)
        return np.concatenate([np.zeros(0, np.int64), *encoded]), lengths

    def to_json(self) -> str:
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file, whole or not at all. Raises OSError."""
        with replacing(Path(path).expanduser()) as file:
            file.write(self.to_json().encode())

    @classmethod
    def load(cls: type[_Own], path: str | os.PathLike[str]) -> _Own:
        """Read what `save` wrote. Raises OSError, or ValueError if the file is something else or damaged."""
        path = Path(path).expanduser()
        return cls.from_json(read_text(path), str(path))

    @classmethod
    def from_json(cls: type[_Own], text: str, name: str) -> _Own:
        raise NotImplementedError


def _numbers(tokens: Iterable[SupportsIndex], n: int) -> list[int]:
    numbers = [index(token) for token in tokens]
    for number in numbers:
        require(0 <= number < n, "a token", number, f"0 to {n - 1}")
    return numbers


_BYTES_FORMAT = "recurra bytes 1"


class ByteEncoder(_Encoder):
    """Each byte of UTF-8 is a token.

    >>> ByteEncoder().encode("né").tolist()
    [110, 195, 169]
    """

    fingerprint = _BYTES_FORMAT
    """A digest that differs whenever the tokens of some text differ."""

    def __len__(self) -> int:
        return 256

    def encode(self, text: str) -> np.ndarray:
        """Turn text into tokens: (n,) int64."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def decode(self, tokens: Iterable[SupportsIndex]) -> str:
        """Turn tokens back into text; bytes that are not UTF-8 become U+FFFD."""
        return bytes(_numbers(tokens, 256)).decode(errors="replace")

    def as_byte_pairs(self) -> "BytePairEncoding":
        """Return byte pairs without any pair, which have the same tokens: what other programs can read."""
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # the bytes that stand for themselves
        others = (byte for byte in range(256) if byte not in printable)
        letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
        return BytePairEncoding(_byte_level(models.BPE({letter: byte for byte, letter in letters.items()}, [])))

    def to_json(self) -> str:
        """Return what `save` writes, as text."""
        return json.dumps({"format": _BYTES_FORMAT})

    @classmethod
    def from_json(cls, text: str, name: str) -> "ByteEncoder":
        """Read what `to_json` returned."""
        if parse_json(text, name).get("format") != _BYTES_FORMAT:
            raise ValueError(sentence(name, "another file", "one written by ByteEncoder.save"))
        return cls()


EOS = "<eos>"
UNK = "<unk>"
_WORDS_FORMAT = "recurra vocabulary 1"
_SURROGATE = re.compile("[\ud800-\udfff]")
_OWN_FILE = "a file written by Vocabulary.save"


class Vocabulary(_Encoder):
    """Words and their tokens.

    Text is split at white space. Each line feed is the word <eos>, and a word outside the vocabulary is <unk>. This is
    how published perplexities on PTB and WikiText-103 count words.

    words: the word of each token; distinct, without white space, and with <eos> and <unk> among them.

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
        for word in self.words:
            # a lone surrogate, which JSON can spell, is no text
            is_word = isinstance(word, str) and word.split() == [word] and not _SURROGATE.search(word)
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

        <eos> is counted at each line end; <unk> is a word like any other, added at the end if the text lacks it.
        """
        counts = count_words(blocks)
        counts.setdefault(EOS, 0)
        counts.setdefault(UNK, 0)
        return cls([word for word, _ in counts.most_common()])

    @classmethod
    def from_json(cls, text: str, name: str) -> "Vocabulary":
        """Read what `to_json` returned; `name` is what messages call it. Raises ValueError as `load`."""
        content = parse_json(text, name)
        if content.get("format") != _WORDS_FORMAT:
            raise ValueError(sentence(name, "not a vocabulary", _OWN_FILE))
        try:
            vocabulary = cls(content.get("words"))
            if vocabulary.fingerprint != content.get("fingerprint"):
                raise ValueError("its words do not match its fingerprint")
        except (TypeError, ValueError) as error:
            raise ValueError(sentence(name, f"a damaged vocabulary ({error})", _OWN_FILE)) from error
        return vocabulary

    def to_json(self) -> str:
        """Return what `save` writes, as text."""
        # json.dumps with indent=0, which is not written in C and takes ten times as long
        words = json.dumps(self.words, ensure_ascii=False, separators=(",\n", ":"))
        return (
            f'{{\n"format": "{_WORDS_FORMAT}",\n"fingerprint": "{self.fingerprint}",\n"words": [\n{words[1:-1]}\n]\n}}'
        )

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
        """Turn tokens back into text: words with a space between them, and a line feed for each <eos>."""
        numbers = _numbers(tokens, len(self.words))
        words = ["\n" if number == self.eos else self.words[number] for number in numbers]
        return " ".join(words).replace(" \n", "\n").replace("\n ", "\n")


def _split(text: str) -> list[str]:
    """Split text into words, with <eos> for each line feed."""
    return text.replace("\n", f" {EOS} ").split()


def count_words(blocks: Iterable[str]) -> Counter[str]:
    """Count the words of a text in blocks of whole lines, <eos> at each line end, in order of appearance."""
    counts: Counter[str] = Counter()
    for block in blocks:
        counts.update(_split(block))
    return counts


# --- the files of the `tokenizers` library, tokenizer.json: checked before the library sees them ---
# The library aborts the process for some numbers of tokens, and accepts damaged JSON. Our own files carry a digest
# inside the key `model`, where the library and transformers ignore unknown keys.


_MOST_TOKENS = 2**24
"""Tokens have numbers below this: a model has a row of weights for each."""


def parse_tokenizer(text: str, name: str) -> dict[str, Any]:
    """Read a tokenizer.json, called `name` in messages; check its digest, if it has one, and its tokens' numbers."""
    content: dict[str, Any] = parse_json(text, name)
    model = content.get("model")
    if not isinstance(model, dict):
        raise ValueError(sentence(name, f"JSON whose model is {kind_of(model)}", "a tokenizer.json"))
    if STAMP in model:
        inside = {key: value for key, value in model.items() if key != STAMP}
        content = checked_stamp({**content, "model": inside, STAMP: model[STAMP]}, name)
    _require_numbers(content, name)
    return content


def tokenizer_of(content: Mapping[str, Any], name: str) -> Tokenizer:
    """Make the tokenizer of what `parse_tokenizer` returned."""
    try:
        with library_errors():
            return Tokenizer.from_str(json.dumps(content))
    except ValueError as error:
        raise ValueError(sentence(name, f"unreadable ({error})", "a tokenizer.json")) from error


@contextmanager
def library_errors() -> Iterator[None]:
    """Turn the errors of the library, bare Exceptions and panics of Rust, into ValueErrors of one line."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:  # a panic is no Exception
        raise ValueError(one_line(error)) from error


def _require_numbers(content: Mapping[str, Any], name: str) -> None:
    vocabulary = content["model"].get("vocab", {})
    if isinstance(vocabulary, dict):
        numbers = list(vocabulary.values())
        _require_tokens(numbers, name)
        if len(set(numbers)) < len(numbers):
            raise ValueError(sentence(name, "a tokenizer with two tokens of one number", "a number for each token"))
    elif not isinstance(vocabulary, list) or len(vocabulary) > _MOST_TOKENS:
        raise ValueError(sentence(name, f"a tokenizer whose vocab is {kind_of(vocabulary)}", "its tokens"))
    added = content.get("added_tokens") or []
    if not (isinstance(added, list) and all(isinstance(token, dict) for token in added)):
        raise ValueError(sentence(name, "a tokenizer whose added_tokens are not objects", "a list of them"))
    _require_tokens([token.get("id") for token in added], name)


def _require_tokens(numbers: list[Any], name: str) -> None:
    for number in numbers:
        if type(number) is not int or not 0 <= number < _MOST_TOKENS:
            got = f"a tokenizer with a token of the number {repr(number)[:60]}"
            raise ValueError(sentence(name, got, f"whole numbers from 0 to {_MOST_TOKENS - 1}"))


# A letter that no training text in the Latin alphabet contains, to see what a tokenizer does with unseen characters.
_RARE_LETTER = "\u16e5"
_KEEPS_ALL = "one with a byte-level alphabet, byte fallback or an unknown token"

_LINE = r"[^\n]*\n|[^\n]+"
# Cuts a text into lines, each with its line feed. The library for browsers knows this behaviour of those that would do.
_LINES = {"type": "Split", "pattern": {"Regex": _LINE}, "behavior": "Isolated", "invert": False}


class BytePairEncoding(_Encoder):
    """A tokenizer of the `tokenizers` library, set up for whole corpora.

    Special tokens are not added (`start` has those in front), and truncation and padding are switched off. Those that
    `train` makes encode each line by itself, so that the tokens of a file do not depend on how it is cut into blocks of
    lines; others may have tokens that span lines. Raises ValueError for a tokenizer that fails on unknown characters or
    drops them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer = Tokenizer.from_str(tokenizer.to_str())  # the caller's own stays as it is
        tokenizer.no_truncation()
        tokenizer.no_padding()
        try:
            with library_errors():  # of a model that lacks its unknown token
                plain = tokenizer.encode(_RARE_LETTER, add_special_tokens=False).ids
                whole = tokenizer.encode(_RARE_LETTER).ids
        except ValueError as error:
            got = f"unable to encode characters that it does not know ({error})"
            raise ValueError(sentence("tokenizer", got, _KEEPS_ALL)) from error
        if not plain:
            raise ValueError(sentence("tokenizer", "one that drops characters that it does not know", _KEEPS_ALL))
        self._tokenizer = tokenizer
        self.start = _before(plain, whole)
        """The special tokens that the tokenizer.json puts in front of a text; none after `train`."""
        self.encodes_lines_apart = _cuts_lines(json.loads(tokenizer.to_str()))
        """Whether the tokens of a text are those of its lines, one after the other, as they are after `train`."""
        self._length = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())

    @classmethod
    def train(cls, blocks: Iterable[str], vocab_size: int) -> "BytePairEncoding":
        """Train on a text in blocks of whole lines: the 256 bytes and at most vocab_size - 256 merges."""
        require_whole_number(256, vocab_size=vocab_size)
        tokenizer = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        tokenizer.train_from_iterator(chain.from_iterable(map(split_lines, blocks)), trainer)
        return cls(tokenizer)

    @classmethod
    def from_json(cls, text: str, name: str) -> "BytePairEncoding":
        """Read any tokenizer.json; `name` is what messages call it. Raises ValueError as `load`."""
        tokenizer = tokenizer_of(parse_tokenizer(text, name), name)
        try:
            return cls(tokenizer)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def to_json(self) -> str:
        """Return what `save` writes, as text: a tokenizer.json that carries its digest."""
        content = stamped(json.loads(self._tokenizer.to_str()))
        content["model"] = {**content["model"], STAMP: content.pop(STAMP)}
        return json.dumps(content, ensure_ascii=False, indent=2)

    def __len__(self) -> int:
        return self._length

    @property
    def fingerprint(self) -> str:
        """A digest of the whole tokenizer, in hexadecimal: equal tokenizers have equal digests."""
        return text_sha256(self._tokenizer.to_str())

    def encode(self, text: str) -> np.ndarray:
        """Turn text into tokens: (n,) int64."""
        return self.encode_each([text])[0]

    def encode_each(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode each text by itself, in parallel. Return all tokens, and how many each text has."""
        pieces = [split_lines(text) if self.encodes_lines_apart else [text] for text in texts]
        batch = list(chain.from_iterable(pieces))
        encoded = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)]
        ends = np.cumsum([0, *map(len, encoded)])
        lengths = np.diff(ends[np.cumsum([0, *map(len, pieces)])])
        return np.fromiter(chain.from_iterable(encoded), np.int64, int(ends[-1])), lengths

    def decode(self, tokens: Iterable[SupportsIndex]) -> str:
        """Turn tokens back into text, special tokens included; bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.decode(_numbers(tokens, self._length), skip_special_tokens=False)


def _byte_level(model: models.BPE) -> Tokenizer:
    """A tokenizer that cuts lines, and those into words, and tells the model their bytes as letters."""
    tokenizer = Tokenizer(model)
    lines = pre_tokenizers.Split(Regex(_LINE), behavior="isolated")
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lines, words])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _before(part: list[int], whole: list[int]) -> tuple[int, ...]:
    """What stands before a part in the whole; nothing if the part is not there."""
    places = range(len(whole) - len(part) + 1)
    return tuple(whole[: next((place for place in places if whole[place : place + len(part)] == part), 0)])


def _cuts_lines(content: dict[str, Any]) -> bool:
    """Whether a tokenizer is certain to encode each line by itself: its words are cut as `train` cuts them."""
    words = (content["pre_tokenizer"] or {}).get("pretokenizers", [])
    cut = [word["type"] for word in words] == ["Split", "ByteLevel"] and words[0] == _LINES
    return cut and content["normalizer"] is None and not content["added_tokens"]


def split_lines(text: str) -> list[str]:
    """Split a text into lines with their line feeds (str.splitlines would also cut at other characters)."""
    lines = [line + "\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]
