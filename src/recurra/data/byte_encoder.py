"""Text as bytes of UTF-8: a vocabulary of 256 tokens that needs no training."""

import json
import os
from collections.abc import Iterable
from operator import index
from pathlib import Path
from typing import SupportsIndex

import numpy as np

from recurra.checks import require, sentence
from recurra.files.reading import read_json
from recurra.files.writing import replacing

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
