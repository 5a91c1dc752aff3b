"""A cache for files that are slow to make, in the user's cache folder or another."""

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import platformdirs

from recurra.checks import sentence
from recurra.files.digests import file_sha256
from recurra.files.reading import read_json
from recurra.files.writing import replacing

_FORMAT = 1


class Cache:
    """Stores what was made from one corpus.

    Entries go to `folder` and nowhere else; by default, to a folder for this corpus in the user's cache folder. Nothing
    is written beside the data: they may be shared, backed up or read-only.

    An entry is a content file NAME.bin and a header NAME.json, {"format", "made_from", "bytes", "sha256"}, that says
    what the entry was made from and what its content must be. Both are written whole or not at all, the header last. An
    entry that is truncated, damaged, made from something else or in another format is therefore detected, never used,
    and made again. Several processes may make the same entry at once.
    """

    def __init__(self, corpus: Path, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = _usual_folder(corpus) if folder is None else Path(folder).expanduser()

    def get(self, name: str, made_from: Mapping[str, object], write: Callable[[BinaryIO], None]) -> Path:
        """Return the path of an entry's content; `write` makes the entry if the folder does not have it.

        name: the readable part of the file name. made_from: everything that the content depends on, as JSON values.
        Raises OSError if the folder cannot be written. Errors that `write` raises for the data are passed on.
        """
        key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
        path = self.folder / f"{name}-{key[:16]}.bin"
        if not _is_sound(path, made_from):
            with saying_cache(self.folder):
                require_write_bit(self.folder)
                _make(path, made_from, write)
        return path


@contextmanager
def saying_cache(folder: Path) -> Iterator[None]:
    """Let errors of files in the folder of a cache say so, and how to name another folder. Raises OSError."""
    try:
        yield
    except OSError as error:
        if error.errno is None or not isinstance(error.filename, str):
            raise  # about the data: the system's errors have a number, and those of writing the name of a file
        path, own = Path(error.filename).absolute(), folder.absolute()
        if not (path.is_relative_to(own) or own.is_relative_to(path)):
            raise
        came, mend = f"{folder}, which cannot be written ({error})", "name another one with data.cache"
        raise OSError(sentence("cache", came, "a folder with room for the encoded data", mend)) from error


def user_cache_folder() -> Path:
    """Return Recurra's folder in the user's cache folder, which on Linux is $XDG_CACHE_HOME or ~/.cache.

    Raises:
        FileNotFoundError: the account has no home, as in some containers.
    """
    folder = Path()
    with suppress(RuntimeError):  # of newer versions; older ones return a relative path
        folder = platformdirs.user_cache_path("recurra", appauthor=False)
    if not folder.is_absolute():
        mend = "name a folder in the recipe, or in the environment variable XDG_CACHE_HOME"
        raise FileNotFoundError(sentence("the user's cache folder", "unknown (no home folder)", "a folder", mend))
    return folder


def _usual_folder(corpus: Path) -> Path:
    return user_cache_folder() / hashlib.sha256(str(corpus.resolve()).encode()).hexdigest()[:16]


def require_write_bit(folder: Path) -> None:
    """Raise PermissionError for a folder marked read-only, or one that would be made inside such a folder.

    The system still lets an administrator write there, and in a container that is often everyone. But if the folder is
    read-only for all users, its owner wants the data to stay as it is.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.stat().st_mode & 0o222:
        raise PermissionError(errno.EACCES, "marked read-only", str(existing))


def _make(path: Path, made_from: Mapping[str, object], write: Callable[[BinaryIO], None]) -> None:
    with replacing(path) as file:
        write(file)
    header = _header(made_from, path.stat().st_size, file_sha256(path))
    with replacing(path.with_suffix(".json")) as file:
        file.write(json.dumps(header, indent=1).encode())


def _is_sound(path: Path, made_from: Mapping[str, object]) -> bool:
    try:
        header = read_json(path.with_suffix(".json"))
        n_bytes = path.stat().st_size
        # The size first: checking it costs nothing and catches most bad entries.
        return bool(header.get("bytes") == n_bytes and header == _header(made_from, n_bytes, file_sha256(path)))
    except (OSError, ValueError):
        return False


def _header(made_from: Mapping[str, object], n_bytes: int, sha256: str) -> dict[str, object]:
    return {"format": _FORMAT, "made_from": dict(made_from), "bytes": n_bytes, "sha256": sha256}
