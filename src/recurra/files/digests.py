"""SHA-256 digests, in hexadecimal: of files, of text, and of JSON objects, which can carry their own."""

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recurra.checks import sentence

BLOCK_BYTES = 4 * 2**20
"""How many bytes of a file are read at a time."""

_logger = logging.getLogger(__name__)
_DIGEST = re.compile(r'"[0-9a-f]{64}"')

STAMP = "sha256"
"""The key under which a JSON object carries the digest of all its other keys."""


def file_sha256(path: Path) -> str:
    """Compute the digest of a file's content. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def text_sha256(text: str) -> str:
    """Compute the digest of a text in UTF-8."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def json_sha256(content: Any) -> str:
    """Compute the digest of what JSON can hold; the order of keys and the layout of the file do not count."""
    # Through JSON and back, so that keys are sorted as the strings that they become.
    plain = json.loads(json.dumps(content))
    return text_sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")))


def stamped(content: Mapping[str, Any]) -> dict[str, Any]:
    """Add the digest of `content` to it, as its last key, `sha256`."""
    inside = {key: value for key, value in content.items() if key != STAMP}
    return {**inside, STAMP: json_sha256(inside)}


def checked_stamp(content: Mapping[str, Any], name: str, mend: str = "") -> dict[str, Any]:
    """Compare content with the digest that it carries, and return it without the digest.

    Args:
        content: a JSON object; without a digest it was written by others or before there were digests, and passes.
        name: what the content is, for the message.
        mend: how to get sound content, for the message.

    Raises:
        ValueError: the content is not what was written.
    """
    inside = {key: value for key, value in content.items() if key != STAMP}
    # A digest in another place was carried there by the damage, with its key or without.
    displaced = STAMP not in content and _DIGEST.search(json.dumps(content))
    if displaced or (STAMP in content and content[STAMP] != json_sha256(inside)):
        raise ValueError(sentence(name, "damaged: its content does not have its digest", "what was written", mend))
    return inside


def note_missing_digest(path: Path | str) -> None:
    """Log that a file has no digest, so that damage to it cannot be recognised."""
    _logger.warning("%s has no digest, so damage to it would not be recognised: it is older, or of others", path)
