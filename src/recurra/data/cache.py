"""A cache for files that are slow to make, in a folder beside the corpus or elsewhere."""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from recurra.checks import sentence
from recurra.files.digests import file_sha256
from recurra.files.writing import replacing

_FORMAT = 1
_BESIDE = ".recurra"


class Cache:
    """Stores what was made from one corpus.

    If `folder` is given, entries go there and nowhere else. Otherwise they go to `.recurra` in the corpus folder; if
    that cannot be written or is marked read-only, they go to a folder under $XDG_CACHE_HOME/recurra (~/.cache/recurra),
    with one warning.

    An entry is a content file NAME.bin and a header NAME.json, {"format", "made_from", "bytes", "sha256"}, that says
    what the entry was made from and what its content must be. Both are written whole or not at all, the header last. An
    entry that is truncated, damaged, made from something else or in another format is therefore detected, never used,
    and made again. Several processes may make the same entry at once.
    """

    def __init__(self, corpus: Path, folder: str | os.PathLike[str] | None = None) -> None:
        self._named = folder is not None
        self._folders = [Path(folder).expanduser()] if folder is not None else _usual_folders(corpus)
        self._warned = False

    def get(self, name: str, made_from: Mapping[str, object], write: Callable[[BinaryIO], None]) -> Path:
        """Return the path of an entry's content; `write` makes the entry if no folder has it.

        name: the readable part of the file name. made_from: everything that the content depends on, as JSON values.
        Raises RuntimeError if no folder can be written. Errors that `write` raises, except OSError, are passed on.
        """
        key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
        file_name = f"{name}-{key[:16]}.bin"
        for folder in self._folders:
            if _is_sound(folder / file_name, made_from):
                return folder / file_name
        refusals = []
        for folder in self._folders:
            try:
                _require_write_bit(folder)
                _make(folder / file_name, made_from, write)
            except OSError as error:
                refusals.append(f"{folder}: {error}")
                continue
            if refusals:
                self._warn(folder, refusals)
            return folder / file_name
        came = "a folder that cannot be written" if self._named else "None, and no default folder can be written"
        raise RuntimeError(sentence("cache", f"{came} ({'; '.join(refusals)})", "a folder that can be written"))

    def _warn(self, folder: Path, refusals: list[str]) -> None:
        if not self._warned:
            warnings.warn(
                f"the encoded corpus is cached in {folder}: the default folder cannot be written "
                f"({'; '.join(refusals)})",
                stacklevel=3,
            )
        self._warned = True


def user_cache_folder() -> Path | None:
    """Return $XDG_CACHE_HOME/recurra or ~/.cache/recurra, or None if the account has no home, as in some containers."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recurra"
    except RuntimeError:
        return None


def _usual_folders(corpus: Path) -> list[Path]:
    base = user_cache_folder()
    digest = hashlib.sha256(str(corpus.resolve()).encode()).hexdigest()
    return [corpus / _BESIDE] + ([] if base is None else [base / digest[:16]])


def _require_write_bit(folder: Path) -> None:
    """Raise PermissionError for a folder marked read-only, or one that would be made inside such a folder.

    The system still lets an administrator write there, and in a container that is often everyone. But if the folder is
    read-only for all users, its owner wants the data to stay as it is.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.stat().st_mode & 0o222:
        raise PermissionError(f"{existing} is marked read-only")


def _make(path: Path, made_from: Mapping[str, object], write: Callable[[BinaryIO], None]) -> None:
    with replacing(path) as file:
        write(file)
    header = _header(made_from, path.stat().st_size, file_sha256(path))
    with replacing(path.with_suffix(".json")) as file:
        file.write(json.dumps(header, indent=1).encode())


def _is_sound(path: Path, made_from: Mapping[str, object]) -> bool:
    try:
        header = json.loads(path.with_suffix(".json").read_bytes())
        n_bytes = path.stat().st_size
        # The size first: checking it costs nothing and catches most bad entries.
        return bool(
            isinstance(header, dict)
            and header.get("bytes") == n_bytes
            and header == _header(made_from, n_bytes, file_sha256(path))
        )
    except (OSError, ValueError):
        return False


def _header(made_from: Mapping[str, object], n_bytes: int, sha256: str) -> dict[str, object]:
    return {"format": _FORMAT, "made_from": dict(made_from), "bytes": n_bytes, "sha256": sha256}
