"""JSON objects that carry the digest of their content, so that a damaged file is never read as a sound one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recurra.checks import sentence
from recurra.files.digests import checked_stamp, stamped
from recurra.files.reading import MOST_BYTES, read_json
from recurra.files.writing import replacing


def write_stamped(path: Path, content: Mapping[str, Any], *, indent: int = 2) -> None:
    """Write a JSON object with its digest as the last key, whole or not at all. Raises OSError."""
    with replacing(path) as file:
        file.write((json.dumps(stamped(content), indent=indent) + "\n").encode())


def read_stamped(
    path: Path,
    what: str = "",
    *,
    version: object = None,
    most_bytes: int = MOST_BYTES,
    allow_nan: bool = False,
    mend: str = "",
) -> dict[str, Any]:
    """Read a JSON object, compare it with its digest, and return it without.

    Args:
        path: the file; without a digest it was written by others or by older versions, and is read as it is.
        what: what the file is, to stand before its name in messages.
        version: what the key `format` has to be; None asks for no such key.
        most_bytes, allow_nan: as in `read_json`.
        mend: how to write the file again, for messages.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a JSON object, is damaged, or has another format.
    """
    name = f"{what} {path}" if what else str(path)
    content = read_json(path, what, most_bytes=most_bytes, allow_nan=allow_nan, mend=mend)
    if version is not None and content.get("format") != version:
        raise ValueError(sentence(f"the format of {path}", repr(content.get("format")), repr(version), mend))
    return checked_stamp(content, name, mend)
