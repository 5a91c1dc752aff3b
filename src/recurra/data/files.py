"""Files that are written whole or not at all, and digests to recognise their content."""

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

BLOCK_BYTES = 4 * 2**20
"""How many bytes of a file are read at a time."""


def file_sha256(path: Path) -> str:
    """Compute the SHA-256 digest of a file's content, in hexadecimal. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` that replaces `path` when the block ends without an error.

    Readers see the old file or the whole new one. On an error the temporary file is removed. Missing folders are made.
    Raises OSError if a folder cannot be made or the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not the tempfile module: only the owner can read its files, and a cache may be shared.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
