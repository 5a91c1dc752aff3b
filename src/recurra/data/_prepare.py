"""From any corpus to shards: in parallel, resumable, each file written whole or not at all, with its digest.

Each unit of the corpus (`_documents.py`) becomes one shard, which counts once its JSON file is there: a killed
preparation keeps what was finished.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_all_start_methods, get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any, TypeAlias

import numpy as np

from recurra._choices import Source
from recurra._files.digests import file_sha256, json_sha256, read_stamped, write_stamped
from recurra._files.writing import leftovers, locked, replacing
from recurra.checks import choose, require, require_whole_number, sentence
from recurra.data._documents import PREPARED, Unit, corpus_path, find_units
from recurra.data._files import grouped, progress
from recurra.data.corpus import DOCUMENTS_SUFFIX, ENCODERS, FORMAT, INDEX, TOKENIZER
from recurra.data.tokenizers import EOS, UNK, ByteEncoder, BytePairEncoding, Vocabulary, count_words, split_lines
from recurra.streams.continuation import TextEncoder

_Map: TypeAlias = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]
"""`map`, whose function may run in other processes; results come in their order."""


@contextmanager
def _worker_map(workers: int) -> Iterator[_Map]:
    """Yield a `map` that calls the function in `workers` processes, or in this one. Raises OSError if one is killed."""
    if workers == 1:
        yield map
        return
    there = "forkserver" in get_all_start_methods()  # not on Windows
    processes = get_context("forkserver" if there else "spawn")
    if there:
        processes.set_forkserver_preload(["recurra.data._prepare"])
    pool = ProcessPoolExecutor(workers, processes, initializer=_end_with_parent)
    try:
        yield pool.map
    except BrokenProcessPool as error:
        hint = "run the same command again, perhaps with fewer --workers"
        raise OSError(sentence("a worker", "killed, perhaps for lack of memory", "one that ends", hint)) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Let this worker end when the process that started it is killed: it would wait for work for ever."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


_SAMPLE_CHARACTERS = 100_000_000
"""How much of the training split a byte pair encoding is trained on: the first of each unit, in equal parts."""


@dataclass(frozen=True)
class Preparation:
    """What to make of a corpus.

    source, path, name, field: where the text is (`find_units`). out: the folder of the shards. vocabulary: "words",
    "bpe" or "bytes". vocab_size: for words the most frequent ones, None for all; for bpe the size. tokenizer: a file to
    take instead of making one. workers: processes.
    """

    source: Source
    path: str
    out: Path
    vocabulary: str = "words"
    vocab_size: int | None = None
    tokenizer: Path | None = None
    workers: int = 1
    name: str | None = None
    field: str = "text"

    def __post_init__(self) -> None:
        choose("vocabulary", ENCODERS, self.vocabulary)
        require_whole_number(1, workers=self.workers)
        require(self.source == "hf" or self.name is None, "name", self.name, "None unless the source is hf")
        require(self.source != "folder" or self.field == "text", "field", self.field, "text, for files without columns")
        made = self.vocabulary == "bpe" and self.tokenizer is None
        require(not made or self.vocab_size is not None, "vocab_size", self.vocab_size, "a size, for bpe")
        if self.vocab_size is not None:
            require_whole_number(1 if made else 3, vocab_size=self.vocab_size)  # a word, <eos> and <unk>
        given = self.vocab_size is None or (self.tokenizer is None and self.vocabulary != "bytes")
        require(given, "vocab_size", self.vocab_size, "None for bytes, or with a tokenizer")


def prepare(what: Preparation, *, report: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Write the shards of a corpus, or those that are missing, and return the index.

    Args:
        what: the corpus and the folder.
        report: called with a line for each stage.
    """
    if what.source in ("jsonl", "hf") and corpus_path(what.source, what.path) == str(what.out.expanduser().resolve()):
        # the shards' own JSON files would be taken for the corpus
        expected = "a folder of its own, which may be in it"
        raise ValueError(sentence("--out", f"{what.out}, the folder of the corpus", expected))
    units = find_units(what.source, what.path, name=what.name, field=what.field)
    if (index := _complete(what, units)) is not None:
        report(_said(units, 0, index["vocab_size"]))
        return index
    what.out.mkdir(parents=True, exist_ok=True)

    def waits(holder: str) -> None:
        report(f"{holder} prepares this corpus: waiting until it has ended")

    with locked(what.out / ".lock", waits) as exclusive:
        return _prepare(what, units, report, exclusive)


def _prepare(what: Preparation, units: list[Unit], report: Callable[[str], None], exclusive: bool) -> dict[str, Any]:
    """Write what is missing. exclusive: as the only process, to which what is left half written belongs."""
    for temporary, _ in leftovers(what.out) if exclusive else ():
        temporary.unlink(missing_ok=True)
    with _worker_map(what.workers) as mapped:
        encoder = _encoder(what, units, mapped, report)
        fingerprint = encoder.fingerprint
        missing = [unit for unit in units if _finished(what, unit, fingerprint) is None]
        report(_said(units, len(missing), len(encoder)))
        work = ((what, fingerprint, unit) for unit in missing)
        with progress("Encoding", len(missing)) as advance:
            for _ in mapped(_write_shard, work):
                advance(1)
    index = _index(what, units, encoder)
    if index is None:  # what was missing was written above
        got, hint = f"{what.out}, whose shards cannot be read back", "run the same command again"
        raise OSError(sentence("--out", got, "a folder on a sound disk", hint))
    write_stamped(what.out / INDEX, index)
    return index


def _said(units: list[Unit], n_missing: int, vocab_size: int) -> str:
    shards = "1 shard" if len(units) == 1 else f"{len(units)} shards"
    return f"{shards}, {len(units) - n_missing} finished; {vocab_size:,} tokens known"


def _complete(what: Preparation, units: list[Unit]) -> dict[str, Any] | None:
    """Return the index if nothing is to be written; then the folder may be another user's. Raises as `prepare`."""
    own, path = what.out / TOKENIZER, what.out / INDEX
    if not (own.is_file() and path.is_file()):
        return None
    encoder = ENCODERS[what.vocabulary].load(own)
    _require_as_asked(what, units, encoder)
    index = _index(what, units, encoder)
    with suppress(OSError, ValueError):
        return index if index == read_stamped(path) else None
    return None


def _index(what: Preparation, units: list[Unit], encoder: TextEncoder) -> dict[str, Any] | None:
    """List the finished shards; None if one is missing."""
    fingerprint = encoder.fingerprint
    splits: dict[str, list[dict[str, Any]]] = {}
    for unit in units:
        entry = _finished(what, unit, fingerprint)
        if entry is None:
            return None
        splits.setdefault(unit.split, []).append(entry)
    return {
        "format": FORMAT,
        "vocabulary": what.vocabulary,
        "fingerprint": fingerprint,
        "vocab_size": len(encoder),
        "splits": splits,
    }


def _encoder(what: Preparation, units: list[Unit], mapped: _Map, report: Callable[[str], None]) -> TextEncoder:
    """Load the tokenizer that is there, or make it. Raises ValueError if the one there is not what was asked for."""
    own, asked = what.out / TOKENIZER, what.out / PREPARED
    if what.tokenizer is not None and not own.exists():
        write_stamped(asked, {"vocab_size": None})
        ENCODERS[what.vocabulary].load(what.tokenizer).save(own)
    if own.exists():
        found = ENCODERS[what.vocabulary].load(own)
        _require_as_asked(what, units, found)
        return found
    training = _training(units)
    encoder: Vocabulary | BytePairEncoding | ByteEncoder
    if what.vocabulary == "bytes":
        encoder = ByteEncoder()
    elif what.vocabulary == "bpe":
        report("training the byte pair encoding")
        assert what.vocab_size is not None  # checked by the dataclass
        share = _SAMPLE_CHARACTERS // len(training)
        encoder = BytePairEncoding.train((text for unit in training for text in _first(unit, share)), what.vocab_size)
    else:
        report("counting words")
        with progress("Counting words", len(training)) as advance:
            total: Counter[str] = Counter()
            for counts in mapped(_count_words, training):
                total.update(counts)
                advance(1)
            encoder = _most_frequent(total, what.vocab_size)
    write_stamped(asked, {"vocab_size": what.vocab_size, "from": _digest(units)})
    encoder.save(own)
    return encoder


def _require_as_asked(what: Preparation, units: list[Unit], found: TextEncoder) -> None:
    """Refuse a tokenizer of another size, of another text, or another one than `what` names."""
    own, hint = what.out / TOKENIZER, "choose another folder with --out"
    if what.tokenizer is not None:
        if ENCODERS[what.vocabulary].load(what.tokenizer).fingerprint != found.fingerprint:
            raise ValueError(sentence("--tokenizer", f"{what.tokenizer}, another vocabulary", f"that in {own}", hint))
        return
    asked = read_stamped(what.out / PREPARED)
    size = asked["vocab_size"]
    if size != what.vocab_size or (size is not None and len(found) > size):
        got = "not given" if what.vocab_size is None else f"{what.vocab_size:,}"
        expected = f"that of {own}, {len(found):,}" + (f" of the {size:,} asked for" if size is not None else "")
        raise ValueError(sentence("--vocab-size", got, expected, hint))
    if what.vocabulary != "bytes" and asked.get("from", _digest(units)) != _digest(units):
        got, expected = f"{what.path}, whose training text has changed", f"the text that {own} was made of"
        raise ValueError(sentence("the corpus", got, expected, f"keep that vocabulary with --tokenizer, or {hint}"))


def _training(units: list[Unit]) -> list[Unit]:
    return [unit for unit in units if unit.split == "train"] or units


def _digest(units: list[Unit]) -> str:
    """Say what a vocabulary is made of: the files and their last bytes, whatever the size of the pieces."""
    return json_sha256({unit.corpus: unit.last for unit in _training(units)})


def _first(unit: Unit, n_characters: int) -> Iterator[str]:
    """Yield the documents of a unit up to about so many characters."""
    for document in unit.documents():
        yield document
        n_characters -= len(document)
        if n_characters <= 0:
            return


def _most_frequent(total: Counter[str], size: int | None) -> Vocabulary:
    words = [word for word, _ in total.most_common() if word not in (EOS, UNK)][: None if size is None else size - 2]
    total.setdefault(EOS, 0)
    total.setdefault(UNK, 0)
    chosen = {*words, EOS, UNK}
    return Vocabulary([word for word, _ in total.most_common() if word in chosen])


def _count_words(unit: Unit) -> Counter[str]:
    return count_words(unit.documents())


_BATCH_CHARACTERS = 1_000_000
_encoders: dict[str, Any] = {}  # of this process, by fingerprint: loading 267,735 words takes a second


def _write_shard(work: tuple[Preparation, str, Unit]) -> None:
    what, fingerprint, unit = work
    if fingerprint not in _encoders:
        _encoders[fingerprint] = ENCODERS[what.vocabulary].load(what.out / TOKENIZER)
    encoder = _encoders[fingerprint]
    dtype = np.dtype("<u1" if len(encoder) <= 2**8 else "<u2" if len(encoder) <= 2**16 else "<u4")
    pieces: list[np.ndarray] = []
    starts: list[np.ndarray] = []
    n_tokens = 0
    for texts in _batches(unit):
        tokens, lengths = encoder.encode_each(texts)
        starts.append(n_tokens + np.cumsum(lengths) - lengths)
        pieces.append(tokens.astype(dtype))
        n_tokens += len(tokens)
    tokens = np.concatenate(pieces) if pieces else np.zeros(0, dtype)
    path = _path(what, unit)
    documents = np.concatenate(starts) if starts else np.zeros(0, dtype=np.int64)
    starts_path = path.with_suffix(DOCUMENTS_SUFFIX)
    for target, array in ((starts_path, documents), (path, tokens)):
        with replacing(target) as file:
            np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
            file.write(array.data)  # NumPy's own write loses the last bytes on a full disk without a word
    entry = {"name": path.name, "tokens": n_tokens, "documents": len(documents), "bytes": path.stat().st_size}
    digests = {"digest": file_sha256(path), "documents_digest": file_sha256(starts_path)}
    made_from = {"from": unit.origin, "fingerprint": fingerprint}
    write_stamped(path.with_suffix(".json"), {**entry, **digests, "made": made_from})


def _batches(unit: Unit) -> Iterator[list[str]]:
    """Yield the documents of a unit in lists of about `_BATCH_CHARACTERS`; each line of a text file is a document."""
    documents = unit.documents()
    return map(split_lines, documents) if unit.source == "folder" else grouped(documents, _BATCH_CHARACTERS)


def _finished(what: Preparation, unit: Unit, fingerprint: str) -> dict[str, Any] | None:
    """Read the entry of a finished shard; None if it is not there, or was made from something else."""
    try:
        entry = read_stamped(_path(what, unit).with_suffix(".json"))
    except (OSError, ValueError):
        return None
    if entry.pop("made") != {"from": unit.origin, "fingerprint": fingerprint}:
        return None
    shard = what.out / entry["name"]
    there = shard.is_file() and shard.stat().st_size == entry["bytes"] and shard.with_suffix(DOCUMENTS_SUFFIX).is_file()
    return entry if there else None


def _path(what: Preparation, unit: Unit) -> Path:
    return what.out / f"{unit.split}-{unit.number:05d}.npy"
