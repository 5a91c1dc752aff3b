"""A text corpus as tokens on disk: the encoded splits of a folder of text files, and prepared shards."""

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

import numpy as np

from recurra._choices import SPLITS, Split, VocabularyKind
from recurra._files.digests import MANIFEST, file_sha256, json_sha256, read_stamped
from recurra.checks import choose, require_literal, sentence
from recurra.data._files import Cache, TextFile, find_text_files, progress, require_splits
from recurra.data.batches import SHARDS, random_generator
from recurra.data.tokenizers import ByteEncoder, BytePairEncoding, Vocabulary
from recurra.streams.continuation import TextEncoder

# Increase this when the same text and vocabulary give different tokens than before: old cache entries are then remade.
_ENCODING = 1


_Tokens = TypeVar("_Tokens")


class _Corpus(Generic[_Tokens]):
    _tokens: dict[Split, _Tokens]
    digests: dict[Split, str]
    """The digest of what each split was read from, wherever that lies."""
    note: str = ""
    """How the text was cut into splits; "" if each split has its files."""

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits in the corpus, in the order train, valid, test."""
        return tuple(split for split in SPLITS if split in self._tokens)

    def tokens(self, split: Split) -> _Tokens:
        """Return the tokens of a split: (n,) of an unsigned type, read from disk on access.

        Raises ValueError for a split that the corpus does not have.
        """
        return choose("split", self._tokens, split)


class TextCorpus(_Corpus[np.ndarray]):
    """The splits of a corpus as tokens.

    encoder: the vocabulary or tokenizer that made them. cache_folder: where they are on disk; None if they are not.
    digests: of the files that they were read from.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        tokens: dict[Split, np.ndarray],
        *,
        cache_folder: Path | None = None,
        digests: dict[Split, str] | None = None,
        note: str = "",
    ) -> None:
        self.encoder = encoder
        self.note = note
        self.cache_folder = cache_folder
        self.digests = digests or {}
        self._tokens = tokens

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        vocabulary: VocabularyKind | TextEncoder = "words",
        bpe_vocab_size: int | None = None,
        cache: str | os.PathLike[str] | None = None,
    ) -> "TextCorpus":
        """Read the corpus in a folder or a file, and encode it the first time.

        path: a folder with a train, a valid and a test file (`find_text_files` lists the names that it recognises); or
            a text file or a folder of .txt files, which is cut at line ends into 90% train, 5% valid and 5% test.
        vocabulary: "words" or "bpe" makes one from the training file ("bpe" with `bpe_vocab_size` tokens), "bytes" is
            that of UTF-8; an encoder is used as it is, and the folder then needs only one of the three files.
        cache: the folder for the encoded splits; None for one in the user's cache folder (see `Cache`).

        Raises OSError for files that are missing or a cache folder that cannot be written, and ValueError for files
        that are ambiguous, empty, too short to be cut or not UTF-8.
        """
        folder = Path(path).expanduser()
        if (vocabulary == "bpe") != (bpe_vocab_size is not None):
            got = f"{bpe_vocab_size!r} with vocabulary={vocabulary!r}"
            raise ValueError(sentence("bpe_vocab_size", got, "a size with vocabulary='bpe', and None otherwise"))
        files = find_text_files(folder)
        store = Cache(folder, cache)
        if isinstance(vocabulary, str):
            require_literal(VocabularyKind, vocabulary=vocabulary)
            require_splits(folder, files)
            is_bytes = vocabulary == "bytes"
            encoder = ByteEncoder() if is_bytes else _make_encoder(files["train"], bpe_vocab_size, store)
        else:
            encoder = vocabulary
        tokens = {split: _encoded(split, file, encoder, store) for split, file in files.items()}
        digests = {split: file.sha256 for split, file in files.items()}
        return cls(encoder, tokens, cache_folder=store.folder, digests=digests, note=_note_on_cut(files))


def _note_on_cut(files: dict[Split, TextFile]) -> str:
    """Say how a text was cut; "" if each split is a file."""
    path = next(iter(files.values())).path
    if len({file.path for file in files.values()}) < len(files):
        sizes = ", ".join(f"{file.n_bytes:,} to {split}" for split, file in files.items())
        return f"split {path.resolve().name} at line ends, in bytes: {sizes}"
    return ""


def _make_encoder(file: TextFile, bpe_vocab_size: int | None, store: Cache) -> TextEncoder:
    made_from: dict[str, object] = {"source": _identity(file), "encoding": _ENCODING}

    def write(out: BinaryIO) -> None:
        if bpe_vocab_size is None:
            made: Vocabulary | BytePairEncoding = Vocabulary.from_text(_read(file, "Counting words"))
        else:
            made = BytePairEncoding.train(_read(file, "Training the tokenizer"), bpe_vocab_size)
        out.write(made.to_json().encode())

    if bpe_vocab_size is None:
        return Vocabulary.load(store.get("words", made_from, write))
    return BytePairEncoding.load(store.get("bpe", made_from | {"bpe_vocab_size": bpe_vocab_size}, write))


def _encoded(split: Split, file: TextFile, encoder: TextEncoder, store: Cache) -> np.ndarray:
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
    with progress(description, file.n_bytes, in_bytes=True) as advance:
        for text, n_read in file.blocks():
            yield text
            advance(n_read)


# Shards: a folder has `tokenizer.json`, `manifest.json` and, for each shard, `SPLIT-00012.npy` with the tokens and
# `SPLIT-00012.documents.npy` with the start of each document. `recurra prepare` writes it. Tokens are read from the
# files when they are asked for, so that memory does not grow with the corpus.

FORMAT = "recurra shards 1"
INDEX = MANIFEST
TOKENIZER = "tokenizer.json"
DOCUMENTS_SUFFIX = ".documents.npy"
ENCODERS: dict[str, type[Vocabulary] | type[BytePairEncoding] | type[ByteEncoder]] = {
    "words": Vocabulary,
    "bpe": BytePairEncoding,
    "bytes": ByteEncoder,
}
_AGAIN = "prepare the corpus again"


@dataclass(frozen=True)
class _Shard:
    """A file of tokens, beside which another one has the places of its documents."""

    path: Path
    n_tokens: int
    sha256: str
    documents_sha256: str

    def read(self, first: int, last: int) -> np.ndarray:
        """Read tokens `first` to `last`. Raises OSError or ValueError if the file is missing or damaged."""
        dtype, offset = _opened(self, _version(self.path))
        with self.path.open("rb") as file:
            file.seek(offset + first * dtype.itemsize)
            return np.frombuffer(file.read((last - first) * dtype.itemsize), dtype=dtype)

    def document_starts(self) -> np.ndarray:
        """Where documents begin: (n_documents,) int64, rising. Raises OSError or ValueError as `read`."""
        return _starts(self, _version(self.path.with_suffix(DOCUMENTS_SUFFIX)))


@cache  # of any number of shards: an entry is small, and a shard takes long to read
def _opened(shard: _Shard, version: tuple[int, ...]) -> tuple[np.dtype, int]:
    """Compare a shard with its digest, once for each version, and find the type of its tokens and where they begin."""
    if file_sha256(shard.path) != shard.sha256:
        raise ValueError(sentence(str(shard.path), "damaged", "the shard that its digest was made of", _AGAIN))
    with shard.path.open("rb") as file:
        np.lib.format.read_magic(file)
        _, _, dtype = np.lib.format.read_array_header_1_0(file)
        return dtype, file.tell()


def _version(path: Path) -> tuple[int, ...]:
    """What differs once a file was written again or another one has taken its place, whatever date it was given."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@lru_cache(maxsize=64)
def _starts(shard: _Shard, version: tuple[int, ...]) -> np.ndarray:
    path = shard.path.with_suffix(DOCUMENTS_SUFFIX)
    if file_sha256(path) != shard.documents_sha256:
        raise ValueError(sentence(str(path), "damaged", "the file that its digest was made of", _AGAIN))
    starts: np.ndarray = np.load(path)
    return starts


@dataclass(frozen=True)
class ShardedTokens:
    """The tokens of a split as one sequence, (n,): `tokens[first:last]` reads them.

    shards: in this sequence's order.
    """

    shards: tuple[_Shard, ...]

    @cached_property
    def edges(self) -> np.ndarray:
        """Where each shard begins, and the end."""
        return np.cumsum([0, *(shard.n_tokens for shard in self.shards)])

    @lru_cache(maxsize=4)  # noqa: B019 - a process has few corpora, for as long as it runs
    def shuffled(self, seed: int, epoch: int) -> "ShardedTokens":
        """Return the shards in the order of an epoch."""
        order = random_generator(seed, SHARDS, epoch).permutation(len(self.shards))
        return ShardedTokens(tuple(self.shards[number] for number in order))

    def __len__(self) -> int:
        return int(self.edges[-1])

    def __getitem__(self, where: slice) -> np.ndarray:
        first, last, _ = where.indices(len(self))
        parts, number = [], int(np.searchsorted(self.edges, first, "right")) - 1
        while first < last:
            start, end = int(self.edges[number]), min(last, int(self.edges[number + 1]))
            parts.append(self.shards[number].read(first - start, end - start))
            first, number = max(first, end), number + 1
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def document_starts(self, first: int, last: int) -> np.ndarray:
        """Find where documents begin among tokens `first` to `last`, counted from the first token of all."""
        found, number = [], int(np.searchsorted(self.edges, first, "right")) - 1
        while number < len(self.shards) and self.edges[number] < last:
            starts = self.shards[number].document_starts() + self.edges[number]
            found.append(starts[np.searchsorted(starts, first) : np.searchsorted(starts, last)])
            number += 1
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


class ShardCorpus(_Corpus[ShardedTokens]):
    """A corpus that `recurra prepare` wrote.

    vocabulary: "words", "bpe" or "bytes". encoder: of its tokens. cache_folder: its folder.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / INDEX).is_file():
            hint = f"write it with `recurra prepare PATH --out {shlex.quote(str(folder))}`"
            raise FileNotFoundError(sentence("data.path", f"{folder}, which has no {INDEX}", "prepared shards", hint))
        index = read_stamped(folder / INDEX, version=FORMAT, hint=_AGAIN)
        self.cache_folder = folder
        self.vocabulary: str = index["vocabulary"]
        self.encoder: TextEncoder = ENCODERS[self.vocabulary].load(folder / TOKENIZER)
        if self.encoder.fingerprint != index["fingerprint"]:
            raise ValueError(sentence(str(folder / TOKENIZER), "another vocabulary", "that of the shards", _AGAIN))
        self._tokens: dict[Split, ShardedTokens] = {}
        self.digests = {split: json_sha256(entries) for split, entries in index["splits"].items()}
        for split, entries in index["splits"].items():
            names = ("tokens", "digest", "documents_digest")
            shards = [_Shard(folder / entry["name"], *(entry[name] for name in names)) for entry in entries]
            for shard, entry in zip(shards, entries):
                if not shard.path.is_file() or shard.path.stat().st_size != entry["bytes"]:
                    raise ValueError(sentence(str(shard.path), "missing or cut short", "a whole shard", _AGAIN))
            self._tokens[split] = ShardedTokens(tuple(shards))
