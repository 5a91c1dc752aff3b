"""The text files of a corpus: which file of a folder is which split, and how they are read."""

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from recurra.data.batches import SPLITS, Split
from recurra.data.files import BLOCK_BYTES, file_sha256

# PTB's own names (ptb.train.txt), WikiText's (wiki.train.tokens, wiki.train.raw), and the plain ones.
_FILE_NAME = re.compile(r"(?:ptb\.|wiki\.)?(train|valid|validation|test)\.(?:txt|tokens|raw)")
_EXPECTED_NAMES = "ptb.SPLIT.txt, wiki.SPLIT.tokens, wiki.SPLIT.raw, SPLIT.txt, SPLIT.tokens or SPLIT.raw"


class TextFile:
    """One UTF-8 text file of a corpus.

    path: the file. n_bytes: its size. sha256: the digest of its content, in hexadecimal.

    Raises ValueError for an empty file, OSError for one that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n_bytes = path.stat().st_size
        if self.n_bytes == 0:
            raise ValueError(f"{path} is empty; expected lines of text")
        self.sha256 = file_sha256(path)

    def blocks(self) -> Iterator[tuple[str, int]]:
        """The text in blocks of whole lines of some 4 MiB, each with the number of its bytes in the file.

        Lines end with a line feed; a last line without one is given one. A byte order mark is dropped.

        Raises ValueError where the bytes are not UTF-8 or the file holds nothing but white space,
        RuntimeError where the file is not the one any more whose digest was taken.
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
            raise RuntimeError(f"{self.path} changed while it was read; run again when nothing writes to it")
        if blank:
            raise ValueError(f"{self.path} holds nothing but white space; expected lines of text")

    def _decode(self, block: bytes, bytes_before: int, lines_before: int) -> str:
        try:
            return block.decode("utf-8")
        except UnicodeDecodeError as error:
            line = lines_before + block.count(b"\n", 0, error.start) + 1
            raise ValueError(
                f"{self.path} is not UTF-8: {error.reason} at byte {bytes_before + error.start} "
                f"(line {line}, value 0x{block[error.start]:02x}); convert it first, e.g. with iconv -t UTF-8"
            ) from error


def find_text_files(folder: str | os.PathLike[str]) -> dict[Split, TextFile]:
    """The splits of a corpus that a folder holds.

    Recognised are ptb.SPLIT.txt, wiki.SPLIT.tokens, wiki.SPLIT.raw and SPLIT.txt, .tokens or .raw, where
    SPLIT is train, valid (or validation) or test. Any of the three may be missing, but not all of them.

    Raises FileNotFoundError for a folder that is missing or holds no such file, NotADirectoryError for a
    file, ValueError where two files claim one split or a file is empty.
    """
    folder = Path(folder).expanduser()
    if not folder.exists():
        raise FileNotFoundError(f"the corpus folder {folder} does not exist")
    if not folder.is_dir():
        raise NotADirectoryError(
            f"{folder} is not a folder; give the folder that holds the train, valid and test files"
        )
    candidates: dict[Split, list[Path]] = {split: [] for split in SPLITS}
    for path in sorted(folder.iterdir()):
        match = _FILE_NAME.fullmatch(path.name)
        if match and path.is_file():
            word = match.group(1)
            candidates[next(split for split in SPLITS if word.startswith(split))].append(path)
    for split, paths in candidates.items():
        if len(paths) > 1:
            names = ", ".join(path.name for path in paths)
            raise ValueError(f"{folder} holds more than one file for the {split} split: {names}; keep one")
    found = {split: TextFile(paths[0]) for split, paths in candidates.items() if paths}
    if not found:
        raise FileNotFoundError(f"{folder} holds no text files; expected {_EXPECTED_NAMES}")
    return found


def require_splits(folder: str | os.PathLike[str], found: dict[Split, TextFile]) -> None:
    """Raise FileNotFoundError, naming them, where splits are missing from `find_text_files(folder)`."""
    missing = [split for split in SPLITS if split not in found]
    if missing:
        present = ", ".join(file.path.name for file in found.values())
        raise FileNotFoundError(
            f"{folder} holds no {' and no '.join(missing)} file (it holds {present}); expected "
            f"{_EXPECTED_NAMES}. Without a vocabulary or a tokenizer of your own, one is made from the "
            "training file and all three files are needed; with one, any of them will do"
        )
