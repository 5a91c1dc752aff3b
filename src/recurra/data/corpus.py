"""A text corpus as numbers: a folder of text files, a vocabulary, and the encoded splits on disk."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Literal, Protocol, SupportsIndex, runtime_checkable

import numpy as np

from recurra.data.batches import SPLITS, Split
from recurra.data.bpe import BytePairEncoding
from recurra.data.cache import Cache
from recurra.data.fields import require_choice
from recurra.data.progress import byte_progress
from recurra.data.text_files import TextFile, find_text_files, require_splits
from recurra.data.vocabulary import Vocabulary

# Raised when the same text and vocabulary come out as other numbers than before: old caches are then made
# anew.
_ENCODING = 1


@runtime_checkable
class TextEncoder(Protocol):
    """What turns text into numbers and back: `Vocabulary`, `BytePairEncoding`, or one of your own."""

    @property
    def fingerprint(self) -> str:
        """A digest that differs where the numbers of any text differ."""
        ...

    def __len__(self) -> int:
        """How many numbers there are; all lie in 0..len-1."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """The numbers of a text: (n,) int64."""
        ...

    def decode(self, tokens: Iterable[SupportsIndex]) -> str:
        """The text of the numbers."""
        ...


class TextCorpus:
    """The splits of a corpus as numbers.

    encoder: the vocabulary or tokenizer that made them.
    splits: the names of the splits that are there.
    """

    def __init__(self, encoder: TextEncoder, tokens: dict[Split, np.ndarray]) -> None:
        self.encoder = encoder
        self._tokens = tokens

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        vocabulary: Literal["words", "bpe"] | TextEncoder = "words",
        bpe_vocab_size: int | None = None,
        cache: str | os.PathLike[str] | None = None,
    ) -> "TextCorpus":
        """Read the corpus in a folder, encoding it the first time.

        path: a folder with a train, a valid and a test file (`find_text_files` says which names are known).
        vocabulary: "words" or "bpe" makes one from the training file ("bpe" with `bpe_vocab_size` tokens); an
            encoder is used as it is, and the folder then needs only one of the three files.
        cache: the folder for the encoded forms; None for one beside the data (see `Cache`).

        Raises FileNotFoundError, NotADirectoryError or ValueError for files that are missing, ambiguous,
        empty or not UTF-8; ValueError for arguments that contradict each other; RuntimeError for a cache
        folder that cannot be written.
        """
        folder = Path(path).expanduser()
        if (vocabulary == "bpe") != (bpe_vocab_size is not None):
            raise ValueError(
                f"bpe_vocab_size goes with vocabulary='bpe' and only with it, got {bpe_vocab_size!r} "
                f"and vocabulary={vocabulary!r}"
            )
        files = find_text_files(folder)
        store = Cache(folder, cache)
        if isinstance(vocabulary, str):
            require_choice("TextCorpus", "vocabulary", vocabulary, ("words", "bpe"))
            require_splits(folder, files)
            encoder = _make_encoder(files["train"], bpe_vocab_size, store)
        else:
            encoder = vocabulary
        return cls(encoder, {split: _encoded(split, file, encoder, store) for split, file in files.items()})

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits that the corpus holds, in the order train, valid, test."""
        return tuple(split for split in SPLITS if split in self._tokens)

    def tokens(self, split: Split) -> np.ndarray:
        """The numbers of a split: (n,) of an unsigned type, read-only, mapped from disk as they are read.

        Raises ValueError for a split that is not there.
        """
        require_choice("TextCorpus", "split", split, self.splits)
        return self._tokens[split]


def _make_encoder(file: TextFile, bpe_vocab_size: int | None, store: Cache) -> TextEncoder:
    """The encoder that a training file yields, from the cache where it is there."""
    made_from: dict[str, object] = {"source": _identity(file), "encoding": _ENCODING}
    if bpe_vocab_size is None:

        def write_words(out: BinaryIO) -> None:
            out.write(Vocabulary.from_text(_read(file, "Counting words")).to_json().encode())

        return Vocabulary.load(store.get("words", made_from, write_words))

    def write_bpe(out: BinaryIO) -> None:
        blocks = _read(file, "Training the tokenizer")
        out.write(BytePairEncoding.train(blocks, bpe_vocab_size).to_json().encode())

    made_from["bpe_vocab_size"] = bpe_vocab_size
    return BytePairEncoding.load(store.get("bpe", made_from, write_bpe))


def _encoded(split: Split, file: TextFile, encoder: TextEncoder, store: Cache) -> np.ndarray:
    """The numbers of a file, from the cache where they are there."""
    # Little-endian and as narrow as the vocabulary allows.
    number_type = np.dtype("<u2" if len(encoder) <= 2**16 else "<u4")

    def write(out: BinaryIO) -> None:
        for text in _read(file, f"Encoding {file.path.name}"):
            out.write(encoder.encode(text).astype(number_type).tobytes())

    made_from = {
        "source": _identity(file),
        "vocabulary": encoder.fingerprint,
        "type": number_type.str,
        "encoding": _ENCODING,
    }
    return np.memmap(store.get(split, made_from, write), dtype=number_type, mode="r")


def _identity(file: TextFile) -> dict[str, object]:
    return {"bytes": file.n_bytes, "sha256": file.sha256}


def _read(file: TextFile, description: str) -> Iterator[str]:
    with byte_progress(description, file.n_bytes) as advance:
        for text, n_read in file.blocks():
            yield text
            advance(n_read)
