"""What turns text into tokens and back."""

from collections.abc import Iterable
from typing import Protocol, SupportsIndex, runtime_checkable

import numpy as np


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
