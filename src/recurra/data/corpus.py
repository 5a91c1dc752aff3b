"""A text corpus as tokens: a folder of text files, a vocabulary, and the encoded splits on disk."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from recurra.checks import require_choice, sentence
from recurra.data.batches import SPLITS, Split
from recurra.data.files import Cache, TextFile, byte_progress, find_text_files, require_splits
from recurra.data.tokenizers import BytePairEncoding, TextEncoder
from recurra.data.vocabulary import Vocabulary

# Increase this when the same text and vocabulary give different tokens than before: old cache entries are then remade.
_ENCODING = 1


class TextCorpus:
    """The splits of a corpus as tokens.

    encoder: the vocabulary or tokenizer that made the tokens. splits: the names of the splits in the corpus.
    cache_folder: where the tokens are on disk; None if they are not.
    """

    def __init__(
        self, encoder: TextEncoder, tokens: dict[Split, np.ndarray], *, cache_folder: Path | None = None
    ) -> None:
        self.encoder = encoder
        self.cache_folder = cache_folder
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
        """Read the corpus in a folder, and encode it the first time.

        path: a folder with a train, a valid and a test file (`find_text_files` lists the names that it recognises).
        vocabulary: "words" or "bpe" makes one from the training file ("bpe" with `bpe_vocab_size` tokens); an encoder
            is used as it is, and the folder then needs only one of the three files.
        cache: the folder for the encoded splits; None for one in the user's cache folder (see `Cache`).

        Raises FileNotFoundError, NotADirectoryError or ValueError for files that are missing, ambiguous, empty or not
        UTF-8; ValueError for arguments that contradict each other; OSError for a cache folder that cannot be
        written.
        """
        folder = Path(path).expanduser()
        if (vocabulary == "bpe") != (bpe_vocab_size is not None):
            got = f"{bpe_vocab_size!r} with vocabulary={vocabulary!r}"
            raise ValueError(sentence("bpe_vocab_size", got, "a size with vocabulary='bpe', and None otherwise"))
        files = find_text_files(folder)
        store = Cache(folder, cache)
        if isinstance(vocabulary, str):
            require_choice(("words", "bpe"), vocabulary=vocabulary)
            require_splits(folder, files)
            encoder = _make_encoder(files["train"], bpe_vocab_size, store)
        else:
            encoder = vocabulary
        tokens = {split: _encoded(split, file, encoder, store) for split, file in files.items()}
        return cls(encoder, tokens, cache_folder=store.folder)

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits in the corpus, in the order train, valid, test."""
        return tuple(split for split in SPLITS if split in self._tokens)

    def tokens(self, split: Split) -> np.ndarray:
        """Return the tokens of a split: (n,) of an unsigned type, read-only, mapped from disk on access.

        Raises ValueError for a split that the corpus does not have.
        """
        require_choice(self.splits, split=split)
        return self._tokens[split]


def _make_encoder(file: TextFile, bpe_vocab_size: int | None, store: Cache) -> TextEncoder:
    """Make the encoder of a training file, or read it from the cache."""
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
    """Encode a file, or read its tokens from the cache."""
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
