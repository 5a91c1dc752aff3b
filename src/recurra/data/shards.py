"""A corpus as numpy shards: files of tokens with their digests, read as if they were one array in any order of shards.

A folder has `tokenizer.json`, `manifest.json` and, for each shard, `SPLIT-00012.npy` with the tokens and
`SPLIT-00012.documents.npy` with the place where each document begins. `recurra prepare` writes it. Tokens are read from
the files when they are asked for, so that memory does not grow with the corpus.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import torch

from recurra.checks import require, require_choice, sentence
from recurra.data.batches import MIXTURES, SHARDS, SPLITS, Batch, Split, random_generator, require_step
from recurra.data.tokenizers import ByteEncoder, BytePairEncoding, TextEncoder
from recurra.data.vocabulary import Vocabulary
from recurra.files.digests import MANIFEST, file_sha256, read_stamped

FORMAT = "recurra shards 1"
INDEX = MANIFEST
TOKENIZER = "tokenizer.json"
MOST_INDEX_BYTES = 2**30
"""Of the list of shards, which has 320 bytes for each."""
DOCUMENTS_SUFFIX = ".documents.npy"
ENCODERS: dict[str, type[Vocabulary] | type[BytePairEncoding] | type[ByteEncoder]] = {
    "words": Vocabulary,
    "bpe": BytePairEncoding,
    "bytes": ByteEncoder,
}
_AGAIN = "prepare the corpus again"


@dataclass(frozen=True)
class _Shard:
    """A file of tokens, beside which another one has the places of its documents.

    n_documents: how many begin in it. sha256, documents_sha256: digests of the two files; older indexes have no second.
    """

    path: Path
    n_tokens: int
    n_documents: int
    sha256: str
    documents_sha256: str | None = None

    def read(self, first: int, last: int) -> np.ndarray:
        """Read tokens `first` to `last`. Raises OSError or ValueError if the file is missing, damaged or replaced."""
        dtype, offset = _opened(self, _version(self.path))
        with self.path.open("rb") as file:
            file.seek(offset + first * dtype.itemsize)
            return np.frombuffer(file.read((last - first) * dtype.itemsize), dtype=dtype)

    def document_starts(self) -> np.ndarray:
        """Where documents begin: (n_documents,) int64, rising. Raises OSError or ValueError as `read`."""
        version = _version(self.path.with_suffix(DOCUMENTS_SUFFIX))
        _require_documents(self, version)
        return _starts(self, version)


@cache  # of any number of shards: an entry is small, and a shard takes long to read
def _opened(shard: _Shard, version: tuple[int, ...]) -> tuple[np.dtype, int]:
    """Compare a shard with its digest, once for each version, and find the type of its tokens and where they begin."""
    if file_sha256(shard.path) != shard.sha256:
        raise ValueError(sentence(str(shard.path), "damaged", "the shard that its digest was made of", _AGAIN))
    with shard.path.open("rb") as file:
        np.lib.format.read_magic(file)
        _, _, dtype = np.lib.format.read_array_header_1_0(file)
        return dtype, file.tell()


@cache
def _require_documents(shard: _Shard, version: tuple[int, ...]) -> None:
    """Compare the places of documents with their digest, once for each version."""
    path = shard.path.with_suffix(DOCUMENTS_SUFFIX)
    if shard.documents_sha256 is not None and file_sha256(path) != shard.documents_sha256:
        raise ValueError(sentence(str(path), "damaged", "the file that its digest was made of", _AGAIN))


def _version(path: Path) -> tuple[int, ...]:
    """What differs once a file was written again or another one has taken its place."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@lru_cache(maxsize=64)
def _starts(shard: _Shard, version: tuple[int, ...]) -> np.ndarray:
    starts: np.ndarray = np.load(shard.path.with_suffix(DOCUMENTS_SUFFIX))
    return starts


@dataclass(frozen=True)
class ShardedTokens:
    """The tokens of a split as one sequence, (n,): `tokens[first:last]` reads them.

    shards: in this sequence's order.
    """

    shards: tuple[_Shard, ...]
    edges: np.ndarray = field(compare=False)

    @classmethod
    def of(cls, shards: Sequence[_Shard]) -> "ShardedTokens":
        """Put shards in a row."""
        return cls(tuple(shards), np.cumsum([0, *(shard.n_tokens for shard in shards)]))

    def shuffled(self, seed: int, epoch: int) -> "ShardedTokens":
        """Return the shards in the order of an epoch."""
        return _shuffled(self, seed, epoch)

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


@lru_cache(maxsize=4)
def _shuffled(tokens: ShardedTokens, seed: int, epoch: int) -> ShardedTokens:
    order = random_generator(seed, SHARDS, epoch).permutation(len(tokens.shards))
    return ShardedTokens.of([tokens.shards[number] for number in order])


class ShardCorpus:
    """A corpus that `recurra prepare` wrote.

    vocabulary: "words", "bpe" or "bytes". encoder: the vocabulary or tokenizer of its tokens. splits: those in it.
    cache_folder: its folder.

    Raises OSError or ValueError for a folder that is no such corpus, or has files missing or cut short.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / INDEX).is_file():
            hint = f"write it with recurra prepare --out {folder}"
            raise FileNotFoundError(sentence("data.path", f"{folder}, which has no {INDEX}", "prepared shards", hint))
        index = read_stamped(folder / INDEX, version=FORMAT, most_bytes=MOST_INDEX_BYTES, hint=_AGAIN)
        self.cache_folder = folder
        self.vocabulary: str = index["vocabulary"]
        self.encoder: TextEncoder = ENCODERS[self.vocabulary].load(folder / TOKENIZER)
        if self.encoder.fingerprint != index["fingerprint"]:
            raise ValueError(sentence(str(folder / TOKENIZER), "another vocabulary", "that of the shards", _AGAIN))
        self._tokens: dict[Split, ShardedTokens] = {}
        for split, entries in index["splits"].items():
            shards = [
                _Shard(folder / e["name"], e["tokens"], e["documents"], e["digest"], e.get("documents_digest"))
                for e in entries
            ]
            for shard, entry in zip(shards, entries):
                if not shard.path.is_file() or shard.path.stat().st_size != entry["bytes"]:
                    raise ValueError(sentence(str(shard.path), "missing or cut short", "a whole shard", _AGAIN))
            self._tokens[split] = ShardedTokens.of(shards)

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits in the corpus, in the order train, valid, test."""
        return tuple(split for split in SPLITS if split in self._tokens)

    def tokens(self, split: Split) -> ShardedTokens:
        """Return the tokens of a split. Raises ValueError for one that the corpus does not have."""
        require_choice(self.splits, split=split)
        return self._tokens[split]


# --- excerpts from several corpora, each drawn as often as its weight says ---


class MixtureSource:
    """Excerpts from random places of several texts, each the start of a new stream.

    The excerpts of a step depend on (seed, epoch, step) alone, whatever the number of ranks. An epoch has as many steps
    as it takes to read as many tokens as all texts have together.

    texts: of prepared corpora with one vocabulary. weights: above 0, one for each; only their ratios count. batch_size:
    excerpts over all ranks together; the attribute of the same name counts those on this rank.

    Raises ValueError for a text shorter than an excerpt.
    """

    def __init__(
        self,
        texts: Sequence[ShardedTokens],
        weights: Sequence[float],
        *,
        batch_size: int,
        segment_length: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        for text in texts:
            require(len(text) > segment_length, "the tokens of a text", len(text), f"at least {segment_length + 1}")
        self.batch_size = batch_size // world_size
        self._texts, self._shares = texts, np.asarray(weights) / sum(weights)
        self._all_ranks, self._segment_length = batch_size, segment_length
        self._seed, self._rank = seed, rank

    def __len__(self) -> int:
        return max(1, sum(map(len, self._texts)) // (self._all_ranks * self._segment_length))

    def batch(self, epoch: int, step: int) -> Batch:
        """Return the excerpts of a step. Raises what `BatchSource.batch` raises."""
        require_step(len(self), epoch, step)
        random = random_generator(self._seed, MIXTURES, epoch, step)
        chosen = random.choice(len(self._texts), size=self._all_ranks, p=self._shares)
        places = random.random(self._all_ranks)
        mine = slice(self._rank * self.batch_size, (self._rank + 1) * self.batch_size)
        excerpts = []
        for number, place in zip(chosen[mine].tolist(), places[mine].tolist()):
            start = int(place * (len(self._texts[number]) - self._segment_length))
            excerpts.append(self._texts[number][start : start + self._segment_length + 1].astype(np.int64))
        tokens = torch.from_numpy(np.stack(excerpts))
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), continues=False)
