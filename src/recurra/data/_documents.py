"""Where the text of large corpora comes from: folders of text, parquet, JSON lines, and data sets of a hub.

A corpus is cut into units that can be read one by one, in any process. Text files are cut at line ends into pieces of
about 8 MB; for everything else `datasets` of Hugging Face says what the units are, usually files, and streams them.
"""

import hashlib
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recurra._choices import SPLITS, Source, Split
from recurra._files.digests import STAMP
from recurra._files.reading import read_json
from recurra.checks import sentence
from recurra.data._files import TextPart, find_text_files, text_blocks

_PIECE_BYTES = 8 * 2**20
PREPARED = "vocabulary.json"
"""The file of a folder of shards that says what its vocabulary was made of, and for which size."""
_HIDDEN = re.compile(r"(^|/)\.")
"""In the path of a file that `datasets` does not read either."""
_SUFFIXES = {"parquet": (".parquet",), "jsonl": (".jsonl", ".json", ".jsonl.gz", ".json.gz")}
_ROWS = 1000
"""Rows of a parquet file that are read at once."""
_BUILDERS = {"parquet": "parquet", "jsonl": "json"}
_UNREADABLE = (OSError, ValueError, EOFError, zlib.error)
_OPENED = "a data set of one configuration (--name, data.subset) with a train, valid or test split"
_HUB_SPLITS: dict[Split, tuple[str, ...]] = {"train": ("train",), "valid": ("validation", "valid"), "test": ("test",)}


@dataclass(frozen=True)
class Unit:
    """A part of a split that is read by itself: bytes `first` to `last` of a text file, or one shard of a data set."""

    split: Split
    number: int
    source: Source
    path: str
    first: int = 0
    last: int = 0
    name: str | None = None
    field: str = "text"
    n_units: int = 1
    identity: str = ""

    @property
    def origin(self) -> str:
        """What its documents depend on, for deciding whether what was made of them before still holds."""
        return f"{self.corpus} {self.first} {self.last}"

    @property
    def corpus(self) -> str:
        """The same for what it is cut from: a file, or a split."""
        if self.source == "folder":
            return self.identity
        place = self.path if self.source == "hf" else ""  # which need not have files; elsewhere a corpus may be moved
        return "\n".join((self.source, self.field, self.name or "", place, self.identity))

    def documents(self) -> Iterator[str]:
        """Yield the documents: whole lines of text files in blocks, or the texts of a data set."""
        if self.source != "folder":
            return self._texts()
        return (text for text, _ in text_blocks(Path(self.path), self.first, self.last, 2**20))

    def _texts(self) -> Iterator[str]:
        for number, row in enumerate(self._rows()):
            text = row.get(self.field)
            if text is None and self.field in row:
                got = f"without a text in row {number + 1:,}"
                raise ValueError(sentence(self._file(), got, f"a text in each row of {self.field!r}"))
            if not isinstance(text, str):
                expected = f"rows with a text of the name {self.field!r}; there is {', '.join(row)}"
                raise ValueError(sentence(self.path, f"a corpus without {self.field!r}", expected, "set --field"))
            yield text if text.endswith("\n") else text + "\n"

    def _rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows that `datasets` reads, whose errors do not say in which file."""
        try:
            rows = _stream(self.source, self.path, self.name, self.split)
            if self.n_units > 1:
                rows = rows.shard(num_shards=self.n_units, index=self.number)
            yield from rows
        except _UNREADABLE as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the system's, which names the file
            kind = OSError if isinstance(error, OSError) else ValueError
            raise kind(sentence(self._file(), f"not readable ({error})", f"whole data ({self.source})")) from error

    def _file(self) -> str:
        """The file that it is read from; the corpus, where a unit is not one file."""
        files = [] if self.source == "hf" else _files(self.source, self.path, self.split)
        return files[self.number] if len(files) == self.n_units else self.path


def find_units(source: Source, path: str, *, name: str | None = None, field: str = "text") -> list[Unit]:
    """List the units of a corpus, split by split, in their order.

    path: a folder, or for "hf" a name of the hub or a local data set. name: the configuration of one of the hub. field:
    which column has the text.
    """
    if source == "folder":
        files = find_text_files(Path(path).expanduser())
        return [unit for split, file in files.items() for unit in _pieces(split, file.parts)]
    path = corpus_path(source, path) if source == "hf" else path
    units: list[Unit] = []
    everything = _everything(path) if source == "hf" else ""
    for split in SPLITS:
        if source != "hf" and not _files(source, path, split):
            continue
        try:
            rows = _stream(source, path, name, split)
        except _UNREADABLE as error:
            if _says_no_split(error):
                continue
            if isinstance(error, OSError) and (source == "hf" or error.errno is not None):
                raise  # of the network, or the system's
            expected = _OPENED if source == "hf" else f"whole files of {source}"
            raise ValueError(sentence("data.path", f"{path}, which cannot be opened ({error})", expected)) from error
        n = max(1, int(rows.num_shards))
        identity = everything if source == "hf" else _identity([Path(file) for file in _files(source, path, split)])
        units += [
            Unit(split, number, source, path, name=name, field=field, n_units=n, identity=identity)
            for number in range(n)
        ]
    if not units:
        raise ValueError(sentence("data.path", path, f"a corpus of {source} with a train, valid or test split"))
    return units


def _pieces(split: Split, parts: Sequence[TextPart]) -> Iterator[Unit]:
    number = 0
    for path, first, end in parts:
        with path.open("rb") as file:
            while first < end:
                file.seek(min(end, first + _PIECE_BYTES) - 1)  # in the last line
                file.readline()
                last = file.tell()
                yield Unit(split, number, "folder", str(path), first, last, identity=_identity([path]))
                first, number = last, number + 1


def _identity(paths: list[Path]) -> str:
    """Sizes and dates: a corpus of terabytes is not read to see whether it has changed. Of many files, their digest."""
    names = ", ".join(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths)
    return names if len(paths) == 1 else hashlib.sha256(names.encode()).hexdigest()


def _everything(path: str) -> str:
    """Identity of all files of a local data set, whose splits only its library knows; "" for a name of the hub."""
    folder = Path(path).expanduser()
    return _identity(_own_files(folder)) if folder.is_dir() else ""


def _own_files(folder: Path) -> list[Path]:
    """List the files of a corpus, without hidden ones and without folders of shards that were made of a corpus."""
    found = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    found = [file for file in found if not _HIDDEN.search(file.relative_to(folder).as_posix())]
    prepared = {file.parent for file in found if file.name == PREPARED and _is_ours(file)} - {folder}
    return [file for file in found if prepared.isdisjoint(file.parents)]


def _is_ours(file: Path) -> bool:
    with suppress(OSError, ValueError):
        return {"vocab_size", STAMP} <= read_json(file).keys()
    return False


def corpus_path(source: Source, path: str) -> str:
    """Return the resolved path of a folder; for "hf", a name of the hub stays as it is."""
    folder = Path(path).expanduser()
    return path if source == "hf" and not folder.is_dir() else str(folder.resolve())


def training_identity(source: Source, path: str) -> str:
    """Say what the training files of a local corpus are, to see whether they have changed; "" for the hub."""
    if source == "hf":
        return _everything(path)
    return _identity([Path(file) for file in _files(source, path, "train")])


def _files(source: Source, path: str, split: Split) -> list[str]:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(sentence("data.path", str(folder), f"a folder with {source} files"))
    found = [file for file in _own_files(folder) if file.name.endswith(_SUFFIXES[source])]
    return [str(file) for file in found if _split_of(file.relative_to(folder)) == split]


def _split_of(file: Path) -> Split | None:
    """The split of a file: that of the first part of its path which begins with one's name."""
    for part in file.parts:
        for split, names in _HUB_SPLITS.items():
            if part.startswith(names):
                return split
    return None


def _says_no_split(error: Exception) -> bool:
    """Whether this is how the library says that a split is not there."""
    return "Bad split" in str(error) or "Unknown split" in str(error)


def _stream(source: Source, path: str, name: str | None, split: Split) -> Any:
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    import datasets  # slow to import, and an extra

    if source == "hf":
        for there in _HUB_SPLITS[split][:-1]:
            try:
                return datasets.load_dataset(path, name, split=there, streaming=True)
            except ValueError as error:
                if not _says_no_split(error):
                    raise
        return datasets.load_dataset(path, name, split=_HUB_SPLITS[split][-1], streaming=True)
    files = _files(source, path, split)
    options = {"batch_size": _ROWS} if source == "parquet" else {}  # else that of the first row group, if there is one
    return datasets.load_dataset(_BUILDERS[source], data_files={split: files}, split=split, streaming=True, **options)
