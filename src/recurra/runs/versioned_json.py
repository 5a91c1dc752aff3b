"""JSON files with a format number: what is kept of runs and measurements in a repository."""

import json
from pathlib import Path
from typing import Any

from recurra.checks import sentence


def read_versioned(path: Path, version: int, mend: str) -> dict[str, Any]:
    """Read a JSON object whose key `format` is `version`.

    Args:
        path: the file.
        version: the expected format.
        mend: how to write the file again, for the error message.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON, or of another format.
    """
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(sentence("file", f"{path}, which is not JSON ({error})", "a JSON object", mend)) from error
    found = plain.get("format") if isinstance(plain, dict) else type(plain).__name__
    if not isinstance(plain, dict) or found != version:
        raise ValueError(sentence(f"the format of {path}", repr(found), repr(version), mend))
    return plain
