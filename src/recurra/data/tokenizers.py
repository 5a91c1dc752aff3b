"""Tokenizers: bytes, byte-level byte pair encoding, and the tokenizer.json files of the `tokenizers` library."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from operator import index
from pathlib import Path
from typing import Any, Protocol, SupportsIndex, runtime_checkable

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from recurra.checks import kind_of, require, require_whole_number, sentence
from recurra.files.digests import STAMP, checked_stamp, stamped
from recurra.files.reading import one_line, parse_json, read_json, read_text
from recurra.files.writing import replacing

# --- what turns text into tokens and back ---


@runtime_checkable
class TextEncoder(Protocol):
    """Turns text into tokens and back: `Vocabulary`, `BytePairEncoding`, or an encoder of your own."""

    @property
    def fingerprint(self) -> str:
        """A digest that differs whenever the tokens of some text differ."""
        ...

    def __len__(self) -> int:
        """How many tokens there are; they are 0..len-1."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Turn text into tokens: (n,) int64."""
        ...

    def decode(self, tokens: Iterable[SupportsIndex]) -> str:
        """Turn tokens back into text."""
        ...


# --- text as bytes of UTF-8: a vocabulary of 256 tokens that needs no training ---


_FORMAT = "recurra bytes 1"


class ByteEncoder:
    """Each byte of UTF-8 is a token.

    >>> ByteEncoder().encode("né").tolist()
    [110, 195, 169]
    """

    fingerprint = _FORMAT
    """A digest that differs whenever the tokens of some text differ."""

    def __len__(self) -> int:
        return 256

    def encode(self, text: str) -> np.ndarray:
        """Turn text into tokens: (n,) int64."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def decode(self, tokens: Iterable[SupportsIndex]) -> str:
        """Turn tokens back into text; bytes that are not UTF-8 become U+FFFD.

        Raises ValueError for a token outside 0 to 255.
        """
        numbers = [index(token) for token in tokens]
        for number in numbers:
            require(0 <= number < 256, "a token", number, "0 to 255")
        return bytes(numbers).decode(errors="replace")

    def to_json(self) -> str:
        """Return what `save` writes, as text."""
        return json.dumps({"format": _FORMAT})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that says what the tokens are, whole or not at all. Raises OSError."""
        with replacing(Path(path).expanduser()) as file:
            file.write(self.to_json().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ByteEncoder":
        """Read what `save` wrote. Raises OSError, or ValueError if the file is something else."""
        if read_json(Path(path).expanduser()).get("format") != _FORMAT:
            raise ValueError(sentence(str(path), "another file", "one written by ByteEncoder.save"))
        return cls()


# --- the files of the `tokenizers` library, tokenizer.json: checked before the library sees them ---
#
# The library aborts the process for some numbers of tokens, and takes over what is damaged but still JSON. Our own
# files carry a digest inside the key `model`, where the library and transformers pass over keys that they do not
# know.


MOST_TOKENIZER_BYTES = 256 * 2**20
"""Maximum size of a tokenizer.json."""
_MOST_TOKENS = 2**24
"""Tokens have numbers below this: a model has a row of weights for each."""


def _stamped_tokenizer(text: str) -> str:
    """Add its digest to a tokenizer.json."""
    content = stamped(json.loads(text))
    content["model"] = {**content["model"], STAMP: content.pop(STAMP)}
    return json.dumps(content, ensure_ascii=False, indent=2)


def parse_tokenizer(text: str, name: str) -> dict[str, Any]:
    """Read a tokenizer.json, compare it with its digest if it carries one, and check the numbers of its tokens.

    Args:
        text: the content of the file.
        name: what messages call it.

    Returns:
        the content, without the digest.
    """
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


# --- byte-level byte pair encoding, trained on a corpus or loaded from a tokenizer.json ---


# A letter that no training text in the Latin alphabet contains, to see what a tokenizer does with unseen characters.
_RARE_LETTER = "\u16e5"
_KEEPS_ALL = "one with a byte-level alphabet, byte fallback or an unknown token"

_LINE = r"[^\n]*\n|[^\n]+"
# Cuts a text into lines, each with its line feed. The library for browsers knows this behaviour of those that would do.
_LINES = {"type": "Split", "pattern": {"Regex": _LINE}, "behavior": "Isolated", "invert": False}
_OUR_WORDS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_LINE_FEED = "\u010a"
"""In the alphabet of bytes."""


class BytePairEncoding:
    """A tokenizer of the `tokenizers` library, set up for whole corpora.

    A text has the tokens that the library gives it, but special tokens are not added (`start` has those in front), and
    truncation and padding are switched off. A byte-level tokenizer decodes to exactly the same text.

    Those that `train` makes encode each line by itself, line feed included: the tokens of a file do not depend on how
    it is cut into blocks of lines. Others may have tokens that span lines, and encode each call's text as a whole.

    Raises ValueError for a tokenizer that fails on unknown characters or drops them.
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
        self._start = _before(plain, whole)
        content = json.loads(tokenizer.to_str())
        if _is_our_older_form(content):
            tokenizer.pre_tokenizer = _by_lines()
            content = json.loads(tokenizer.to_str())
        self._by_lines = _cuts_lines(content)
        self._length = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())

    @classmethod
    def train(cls, blocks: Iterable[str], vocab_size: int) -> "BytePairEncoding":
        """Train on a text in blocks of whole lines: the 256 bytes and at most vocab_size - 256 merges.

        A short text may give fewer merges. Raises ValueError for a vocab_size below 256, the number of bytes.
        """
        require_whole_number(256, vocab_size=vocab_size)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = _by_lines()
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        tokenizer.train_from_iterator(chain.from_iterable(map(split_lines, blocks)), trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "BytePairEncoding":
        """Read a tokenizer.json. Raises FileNotFoundError, or ValueError if the file is something else."""
        path = Path(path).expanduser()
        return cls.from_json(read_text(path, most_bytes=MOST_TOKENIZER_BYTES), str(path))

    @classmethod
    def from_json(cls, text: str, name: str) -> "BytePairEncoding":
        """Read what `to_json` returned, or others; `name` is what messages call it. Raises ValueError as `load`."""
        tokenizer = tokenizer_of(parse_tokenizer(text, name), name)
        try:
            return cls(tokenizer)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a tokenizer.json, whole or not at all. Raises OSError."""
        with replacing(Path(path).expanduser()) as file:
            file.write(self.to_json().encode())

    def to_json(self) -> str:
        """Return what `save` writes, as text: a tokenizer.json that carries its digest."""
        return _stamped_tokenizer(self._tokenizer.to_str())

    def __len__(self) -> int:
        return self._length

    @property
    def fingerprint(self) -> str:
        """A digest of the whole tokenizer, in hexadecimal: equal tokenizers have equal digests.

        It also differs from what it was while all tokenizers were given lines, if the tokens of a text do.
        """
        text = self._tokenizer.to_str()
        if self._by_lines:
            content = json.loads(text)
            words = content["pre_tokenizer"]["pretokenizers"][1]
            text = Tokenizer.from_str(json.dumps({**content, "pre_tokenizer": words})).to_str()
        else:
            text = f"whole texts\n{text}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def start(self) -> tuple[int, ...]:
        """The special tokens that the tokenizer.json puts in front of a text; none after `train`."""
        return self._start

    @property
    def encodes_lines_apart(self) -> bool:
        """Whether the tokens of a text are those of its lines, one after the other, as they are after `train`."""
        return self._by_lines

    def encode(self, text: str) -> np.ndarray:
        """Turn text into tokens: (n,) int64."""
        texts = split_lines(text) if self._by_lines else [text]  # in parallel, where lines do not depend on each other
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return np.fromiter(chain.from_iterable(encoding.ids for encoding in encodings), dtype=np.int64)

    def decode(self, tokens: Iterable[SupportsIndex]) -> str:
        """Turn tokens back into text, special tokens included; bytes that are not UTF-8 become U+FFFD.

        Raises ValueError for a token outside the vocabulary.
        """
        numbers = [index(token) for token in tokens]
        for number in numbers:
            require(0 <= number < self._length, "a token", number, f"0 to {self._length - 1}")
        return self._tokenizer.decode(numbers, skip_special_tokens=False)


def _before(part: list[int], whole: list[int]) -> tuple[int, ...]:
    """What stands before a part in the whole; nothing if the part is not there."""
    places = range(len(whole) - len(part) + 1)
    return tuple(whole[: next((place for place in places if whole[place : place + len(part)] == part), 0)])


def _by_lines() -> pre_tokenizers.PreTokenizer:
    """Cut a text into lines, and those into words."""
    lines = pre_tokenizers.Split(Regex(_LINE), behavior="isolated")
    return pre_tokenizers.Sequence([lines, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def _is_our_older_form(content: dict[str, Any]) -> bool:
    """Whether `train` made this before its tokenizers cut lines themselves: then no token goes on after a line feed."""
    plain = content["normalizer"] is content["post_processor"] is None and not content["added_tokens"]
    if not plain or content["pre_tokenizer"] != _OUR_WORDS or content["model"]["type"] != "BPE":
        return False
    return not any(_LINE_FEED in token[:-1] for token in content["model"]["vocab"])


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
