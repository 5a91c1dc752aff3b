"""The text files of a corpus, a cache for what is slow to make, and progress bars."""

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import platformdirs

from recurra._choices import SPLITS, Split
from recurra._files.digests import BLOCK_BYTES, file_sha256
from recurra._files.reading import read_json
from recurra._files.writing import discard, leftovers, locked, replacing, write_json
from recurra.checks import sentence


@contextmanager
def progress(description: str, total: int, *, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of items (or bytes) done since the last call.

    Draws a bar if standard error is a terminal and the work takes more than a few seconds.
    """
    if total < (_WORTH_A_BAR if in_bytes else _MANY_ITEMS) or not sys.stderr.isatty():
        yield lambda n_done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    count = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda n_done: bar.advance(task, n_done)


_WORTH_A_BAR = 32 * 2**20
_MANY_ITEMS = 500


_FORMAT = 1
_ENTRY = re.compile(r".+-[0-9a-f]{16}\.(bin|json)")


class Cache:
    """Stores what was made from one corpus, in `folder` or by default in a folder of the user's cache.

    Nothing is written beside the data. An entry is a content file NAME.bin and a header NAME.json with what it was made
    from and its digest, written last: an entry that is damaged or made from something else is made again. One process
    at a time makes entries.
    """

    def __init__(self, corpus: Path, folder: str | os.PathLike[str] | None = None) -> None:
        if folder is None:
            folder = user_cache_folder() / hashlib.sha256(str(corpus.resolve()).encode()).hexdigest()[:16]
        self.folder = Path(folder).expanduser()

    def get(self, name: str, made_from: Mapping[str, object], write: Callable[[BinaryIO], None]) -> Path:
        """Return the path of an entry's content; `write` makes the entry if the folder does not have it.

        name: the readable part of the file name. made_from: everything that the content depends on, as JSON values.
        """
        key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
        path = self.folder / f"{name}-{key[:16]}.bin"
        if not _is_sound(path, made_from):
            with saying_cache(self.folder), self._alone():
                if not _is_sound(path, made_from):  # another process may have made it
                    with replacing(path) as file:
                        write(file)
                    write_json(path.with_suffix(".json"), _header(path, made_from), indent=1)
        return path

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes out where that can be done, and remove what killed ones left half written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            with suppress(PermissionError):  # another user's lock, in a folder that several share
                exclusive = stack.enter_context(locked(self.folder / ".lock"))
                for temporary, name in leftovers(self.folder) if exclusive else ():
                    if _ENTRY.fullmatch(name):  # the folder may have other things
                        discard(temporary)
            yield


@contextmanager
def saying_cache(folder: Path) -> Iterator[None]:
    """Let errors of files in a cache folder say so, and how to name another folder."""
    try:
        yield
    except OSError as error:
        if error.errno is None or not isinstance(error.filename, str):
            raise  # about the data: the system's errors have a number, and those of writing the name of a file
        path, own = Path(error.filename).absolute(), folder.absolute()
        if not (path.is_relative_to(own) or own.is_relative_to(path)):
            raise
        got, hint = f"{folder}, which cannot be written ({error})", "name another one with data.cache"
        raise OSError(sentence("cache", got, "a folder with room for the encoded data", hint)) from error


def user_cache_folder() -> Path:
    """Return Recurra's folder in the user's cache folder, which on Linux is $XDG_CACHE_HOME or ~/.cache."""
    folder = Path()
    with suppress(RuntimeError):  # of newer versions; older ones return a relative path
        folder = platformdirs.user_cache_path("recurra", appauthor=False)
    if not folder.is_absolute():
        hint = "name a folder in the recipe, or in the environment variable XDG_CACHE_HOME"
        raise FileNotFoundError(sentence("the user's cache folder", "unknown (no home folder)", "a folder", hint))
    return folder


def _is_sound(path: Path, made_from: Mapping[str, object]) -> bool:
    try:
        header = read_json(path.with_suffix(".json"))
        # The size first: checking it costs nothing and catches most bad entries.
        return bool(header.get("bytes") == path.stat().st_size and header == _header(path, made_from))
    except (OSError, ValueError):
        return False


def _header(path: Path, made_from: Mapping[str, object]) -> dict[str, object]:
    n_bytes, sha256 = path.stat().st_size, file_sha256(path)
    return {"format": _FORMAT, "made_from": dict(made_from), "bytes": n_bytes, "sha256": sha256}


_FILE_NAME = re.compile(r"(?:ptb\.|wiki\.)?(train|valid|validation|test)\.(?:txt|tokens|raw)")
_NAMES = "ptb.SPLIT.txt, wiki.SPLIT.tokens, wiki.SPLIT.raw, SPLIT.txt, SPLIT.tokens or SPLIT.raw"
TEXT = "a text file, a folder of .txt files, or a folder with the train, valid and test files"


class TextPart(NamedTuple):
    """Whole lines of a file: bytes `first` to `last`."""

    path: Path
    first: int
    last: int


class TextFile:
    """The UTF-8 text of one split, not empty, with its size and digest: a whole file, or parts of one or several.

    path: the file, or what was cut into parts.
    """

    def __init__(self, path: Path, parts: Sequence[TextPart] | None = None) -> None:
        self.path = path
        self.parts = [TextPart(path, 0, path.stat().st_size)] if parts is None else parts
        self.n_bytes = sum(part.last - part.first for part in self.parts)
        if self.n_bytes == 0:
            raise ValueError(sentence(str(path), "empty", "lines of text"))
        self.sha256 = file_sha256(path) if parts is None else _parts_sha256(parts)

    def blocks(self) -> Iterator[tuple[str, int]]:
        """Yield the text in blocks of whole lines, about 4 MiB each, with the number of bytes that each takes.

        A line feed is added to a last line without it, and a byte order mark dropped. Raises ValueError if the file is
        not UTF-8 or only white space, and OSError if it has changed since its digest was taken.
        """
        digest = hashlib.sha256()
        blank = True
        for part in self.parts:
            for text, block in text_blocks(*part, BLOCK_BYTES):
                digest.update(block)
                blank = blank and not text.strip()
                yield text, len(block)
        if digest.hexdigest() != self.sha256:
            got = "not the file that it was when reading began"
            raise OSError(sentence(str(self.path), got, "a file that nothing writes to", "run again"))
        if blank:
            raise ValueError(sentence(str(self.path), "only white space", "lines of text"))


def text_blocks(path: Path, first: int, last: int, n_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Yield bytes `first` to `last` of a file, which are whole lines, in blocks of about `n_bytes`: as text and as they
    are. The text ends with a line feed and has no byte order mark."""
    with path.open("rb") as file:
        file.seek(first)
        while (place := file.tell()) < last:
            block = file.read(min(n_bytes, last - place))
            if not block:
                expected = "a file that nothing writes to while it is read"
                raise OSError(sentence(str(path), "shorter than when it was listed", expected, "run again"))
            if place + len(block) < last:
                block += file.readline()
            try:
                text = block.decode("utf-8")
            except UnicodeDecodeError as error:
                got = f"not UTF-8 (byte {place + error.start} is {block[error.start]:#04x})"
                hint = "convert it first, for example with iconv -t UTF-8"
                raise ValueError(sentence(str(path), got, "text in UTF-8", hint)) from error
            if place == 0:
                text = text.removeprefix("\ufeff")
            yield text if text.endswith("\n") else text + "\n", block


def find_text_files(path: str | os.PathLike[str]) -> dict[Split, TextFile]:
    """Find the splits of a corpus: in the files of a folder, or by cutting a text.

    Recognised names are ptb.SPLIT.txt, wiki.SPLIT.tokens, wiki.SPLIT.raw and SPLIT.txt, .tokens or .raw, where SPLIT is
    train, valid (or validation) or test. Splits may be missing, but not all three. The .txt files of a folder without
    such names, or a single file, are cut: the first 90% of the text to train, then 5% to valid and 5% to test.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        raise FileNotFoundError(sentence("path", f"{folder}, which does not exist", TEXT))
    if not folder.is_dir():
        return _cut(folder, [folder])
    candidates: dict[Split, list[Path]] = {split: [] for split in SPLITS}
    others = []
    for file in sorted(folder.iterdir()):
        match = _FILE_NAME.fullmatch(file.name)
        if match and file.is_file():
            word = match.group(1)
            candidates[next(split for split in SPLITS if word.startswith(split))].append(file)
        elif file.suffix.lower() == ".txt" and file.is_file() and not file.name.startswith("."):
            others.append(file)
    for split, paths in candidates.items():
        if len(paths) > 1:
            names = ", ".join(path.name for path in paths)
            got = f"in {len(paths)} files ({names})"
            raise ValueError(sentence(f"the {split} split of {folder}", got, "one file", "remove the others"))
    found = {split: TextFile(paths[0]) for split, paths in candidates.items() if paths}
    if not found and not others:
        got, expected = f"{folder}, which has no text files", f".txt files, or files named {_NAMES}"
        raise FileNotFoundError(sentence("path", got, expected))
    return found or _cut(folder, others)


def _cut(path: Path, files: list[Path]) -> dict[Split, TextFile]:
    """Cut a text, files one after the other, at line ends: 90% of the bytes to train, 5% to valid and 5% to test."""
    whole = [TextPart(file, 0, file.stat().st_size) for file in files]
    n_bytes = sum(part.last for part in whole)
    if n_bytes == 0:
        raise ValueError(sentence(str(path), "empty", "lines of text"))
    ends = [_line_end(whole, n_bytes * 90 // 100), _line_end(whole, n_bytes * 95 // 100), n_bytes]
    parts = {split: _between(whole, first, last) for split, first, last in zip(SPLITS, [0, *ends], ends)}
    if not all(parts.values()):
        got, expected = f"{path}, a text of {n_bytes:,} bytes with too few lines", "text that can be cut at line ends"
        hint = "add text or line breaks, or make the files train.txt, valid.txt and test.txt yourself"
        raise ValueError(sentence("path", got, expected, hint))
    return {split: TextFile(path, own) for split, own in parts.items()}


def _line_end(whole: list[TextPart], place: int) -> int:
    """Find the first line end at or after a place of the joined files."""
    before = 0
    for path, _, size in whole:
        if place <= before + size:
            with path.open("rb") as file:
                file.seek(max(place - before - 1, 0))  # in the last line before the place
                file.readline()
                return before + file.tell()
        before += size
    return before


def _between(whole: list[TextPart], first: int, last: int) -> list[TextPart]:
    """Return the parts of files between two places of the joined files."""
    parts, before = [], 0
    for path, _, size in whole:
        part = TextPart(path, max(first - before, 0), min(last - before, size))
        parts += [part] if part.first < part.last else []
        before += size
    return parts


def _parts_sha256(parts: Sequence[TextPart]) -> str:
    digest = hashlib.sha256()
    for path, first, last in parts:
        with path.open("rb") as file:
            file.seek(first)
            while block := file.read(min(BLOCK_BYTES, last - file.tell())):
                digest.update(block)
    return digest.hexdigest()


def require_splits(folder: str | os.PathLike[str], found: dict[Split, TextFile]) -> None:
    """Raise FileNotFoundError if splits are missing from `found`, the result of `find_text_files(folder)`."""
    missing = [split for split in SPLITS if split not in found]
    if missing:
        present = ", ".join(file.path.name for file in found.values())
        got = f"{folder}, which has no {' and no '.join(missing)} file (only {present})"
        hint = "any one of them is enough if you pass a vocabulary or tokenizer instead of making one from the text"
        raise FileNotFoundError(sentence("path", got, f"a train, a valid and a test file named {_NAMES}", hint))


def grouped(texts: Iterable[str], n_characters: int) -> Iterator[list[str]]:
    """Group texts into lists of at least `n_characters` in total; the last list may have fewer."""
    waiting: list[str] = []
    size = 0
    for text in texts:
        waiting.append(text)
        size += len(text)
        if size >= n_characters:
            yield waiting
            waiting, size = [], 0
    if waiting:
        yield waiting


def joined(texts: Iterable[str], n_characters: int) -> Iterator[str]:
    """Join texts to longer ones, each of at least `n_characters` but for the last."""
    return map("".join, grouped(texts, n_characters))
