"""A cache of files that take long to make, in a folder beside the corpus or elsewhere."""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from recurra.data.files import file_sha256, replacing

_FORMAT = 1
_BESIDE = ".recurra"


class Cache:
    """Where the encoded forms of one corpus are kept.

    Without a folder of its own: `.recurra` in the corpus folder, and where that cannot be written or is
    marked read-only, a folder under $XDG_CACHE_HOME/recurra (~/.cache/recurra), with one warning. With
    one: that folder or none.

    An entry is a content file NAME.bin and a header NAME.json that says what it was made from and what its
    content must be: {"format", "made_from", "bytes", "sha256"}. Both are written whole or not at all, the
    header last, so an entry that is truncated, damaged, made from something else or by another format is
    seen as such, is never used and is made anew. Several processes may make the same entry at once.
    """

    def __init__(self, corpus: Path, folder: str | os.PathLike[str] | None = None) -> None:
        self._named = folder is not None
        self._folders = [Path(folder).expanduser()] if folder is not None else _usual_folders(corpus)
        self._warned = False

    def get(self, name: str, made_from: Mapping[str, object], write: Callable[[BinaryIO], None]) -> Path:
        """The path of an entry's content, made by `write` where no folder holds it.

        name: what people read in the file's name. made_from: everything that the content depends on, in
        plain JSON values. Raises RuntimeError where no folder can be written; what `write` raises, OSError
        aside, comes through.
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
        which = "the cache folder that was asked for" if self._named else "any cache folder"
        raise RuntimeError(
            f"the encoded corpus could not be written to {which} ({'; '.join(refusals)}); "
            "give a folder that can be written as `cache`"
        )

    def _warn(self, folder: Path, refusals: list[str]) -> None:
        if not self._warned:
            warnings.warn(
                f"the encoded corpus is kept in {folder}, because the usual place could not be written "
                f"({'; '.join(refusals)})",
                stacklevel=3,
            )
        self._warned = True


def user_cache_folder() -> Path | None:
    """$XDG_CACHE_HOME/recurra or ~/.cache/recurra; None for an account without a home, as in some containers."""
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

    The system lets an administrator (in a container, often everybody) write there all the same; whoever
    took the mark away from all users meant the data to stay as it is.
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
        # The size first: it costs nothing and tells most bad entries.
        return bool(
            isinstance(header, dict)
            and header.get("bytes") == n_bytes
            and header == _header(made_from, n_bytes, file_sha256(path))
        )
    except (OSError, ValueError):
        return False


def _header(made_from: Mapping[str, object], n_bytes: int, sha256: str) -> dict[str, object]:
    return {"format": _FORMAT, "made_from": dict(made_from), "bytes": n_bytes, "sha256": sha256}
