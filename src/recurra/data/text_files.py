"""The text files of a corpus: which file in a folder is which split, and how to read them."""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from recurra.checks import sentence
from recurra.data.batches import SPLITS, Split
from recurra.files.digests import BLOCK_BYTES, file_sha256

# The names of PTB (ptb.train.txt) and WikiText (wiki.train.tokens, wiki.train.raw), and plain ones.
_FILE_NAME = re.compile(r"(?:ptb\.|wiki\.)?(train|valid|validation|test)\.(?:txt|tokens|raw)")
_NAMES = "ptb.SPLIT.txt, wiki.SPLIT.tokens, wiki.SPLIT.raw, SPLIT.txt, SPLIT.tokens or SPLIT.raw"
_FOLDER = "a folder with the train, valid and test files"


class TextFile:
    """One UTF-8 text file of a corpus.

    path: the file. n_bytes: its size. sha256: the digest of its content, in hexadecimal.

    Raises ValueError for an empty file, and OSError for one that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n_bytes = path.stat().st_size
        if self.n_bytes == 0:
            raise ValueError(sentence(str(path), "empty", "lines of text"))
        self.sha256 = file_sha256(path)

    def blocks(self) -> Iterator[tuple[str, int]]:
        """Yield the text in blocks of whole lines, about 4 MiB each, with the number of bytes that each takes.

        Every line ends with a line feed; one is added to a last line without it. A byte order mark is dropped.

        Raises ValueError if the bytes are not UTF-8 or the file has only white space, and OSError if the file has
        changed since its digest was taken.
        """
        digest = hashlib.sha256()
        n_bytes = n_lines = 0
        blank = True
        with self.path.open("rb") as file:
            while block := file.read(BLOCK_BYTES) + file.readline():
                digest.update(block)
                text = self._decode(block, n_bytes, n_lines)
                if n_bytes == 0:
                    text = text.removeprefix("\ufeff")
                n_bytes += len(block)
                n_lines += block.count(b"\n")
                blank = blank and not text.strip()
                yield text if text.endswith("\n") else text + "\n", len(block)
        if digest.hexdigest() != self.sha256:
            came = "not the file that it was when reading began"
            raise OSError(sentence(str(self.path), came, "a file that nothing writes to", "run again"))
        if blank:
            raise ValueError(sentence(str(self.path), "only white space", "lines of text"))

    def _decode(self, block: bytes, bytes_before: int, lines_before: int) -> str:
        try:
            return block.decode("utf-8")
        except UnicodeDecodeError as error:
            line = lines_before + block.count(b"\n", 0, error.start) + 1
            where = f"byte {bytes_before + error.start}, line {line}, value 0x{block[error.start]:02x}"
            came = f"not UTF-8 ({error.reason} at {where})"
            mend = "convert it first, for example with iconv -t UTF-8"
            raise ValueError(sentence(str(self.path), came, "UTF-8 text", mend)) from error


def find_text_files(folder: str | os.PathLike[str]) -> dict[Split, TextFile]:
    """Find the splits of a corpus in a folder.

    Recognised names are ptb.SPLIT.txt, wiki.SPLIT.tokens, wiki.SPLIT.raw and SPLIT.txt, .tokens or .raw, where SPLIT is
    train, valid (or validation) or test. Splits may be missing, but not all three.

    Raises FileNotFoundError for a folder that does not exist or has no such file, NotADirectoryError for a file, and
    ValueError if two files claim one split or a file is empty.
    """
    folder = Path(folder).expanduser()
    if not folder.exists():
        raise FileNotFoundError(sentence("path", f"{folder}, which does not exist", _FOLDER))
    if not folder.is_dir():
        raise NotADirectoryError(sentence("path", f"{folder}, a file", _FOLDER))
    candidates: dict[Split, list[Path]] = {split: [] for split in SPLITS}
    for path in sorted(folder.iterdir()):
        match = _FILE_NAME.fullmatch(path.name)
        if match and path.is_file():
            word = match.group(1)
            candidates[next(split for split in SPLITS if word.startswith(split))].append(path)
    for split, paths in candidates.items():
        if len(paths) > 1:
            names = ", ".join(path.name for path in paths)
            came = f"in {len(paths)} files ({names})"
            raise ValueError(sentence(f"the {split} split of {folder}", came, "one file", "remove the others"))
    found = {split: TextFile(paths[0]) for split, paths in candidates.items() if paths}
    if not found:
        raise FileNotFoundError(sentence("path", f"{folder}, which has no text files", f"files named {_NAMES}"))
    return found


def require_splits(folder: str | os.PathLike[str], found: dict[Split, TextFile]) -> None:
    """Raise FileNotFoundError if splits are missing from `found`, the result of `find_text_files(folder)`."""
    missing = [split for split in SPLITS if split not in found]
    if missing:
        present = ", ".join(file.path.name for file in found.values())
        came = f"{folder}, which has no {' and no '.join(missing)} file (only {present})"
        mend = "any one of them is enough if you pass a vocabulary or tokenizer instead of making one from the text"
        raise FileNotFoundError(sentence("path", came, f"a train, a valid and a test file named {_NAMES}", mend))


def joined(texts: Iterable[str], n_characters: int) -> Iterator[str]:
    """Join texts to longer ones, each of at least `n_characters` but for the last."""
    waiting: list[str] = []
    size = 0
    for text in texts:
        waiting.append(text)
        size += len(text)
        if size >= n_characters:
            yield "".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield "".join(waiting)
