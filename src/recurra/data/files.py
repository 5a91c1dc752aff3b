"""Files that are there whole or not at all, and the digests that tell whether they are the ones meant."""

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

BLOCK_BYTES = 4 * 2**20
"""How much of a file is read at once."""


def file_sha256(path: Path) -> str:
    """The SHA-256 digest of a file's content, in hexadecimal. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path`, which takes the place of `path` when the block ends without error.

    Readers see the old file or the whole new one. On an error the temporary file is removed. Folders are made
    as needed. Raises OSError where that or the writing is not possible.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not the tempfile module: its files are readable by their owner alone, and a cache may be shared.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
