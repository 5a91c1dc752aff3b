"""Files that are written whole or not at all, and locks between processes."""

import errno
import json
import os
import re
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

NO_ROOM = frozenset({errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)})
"""The numbers of errors for lack of room: the disk is full, or a limit of the user or the process is reached."""

_WITHOUT_LOCKS = frozenset({errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK})
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` that replaces `path` when the block ends without an error.

    Readers see the old file or the whole new one, also after a power failure. On an error the temporary file is
    removed. Missing folders are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_of(path)
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(temporary)):
            raise  # of another file
        raise OSError(error.errno, error.strerror, str(path)) from error  # of the same class, which errno decides
    finally:
        temporary.unlink(missing_ok=True)


def replace_files(contents: dict[Path, bytes]) -> None:
    """Write several files, each whole or not at all: they take their places, in this order, once all are written.

    The last one is the one without which the others are not read. It is removed before they change, so that a process
    killed in between leaves nothing that is taken for whole. Raises OSError.
    """
    *_, last = contents
    with ExitStack() as stack:
        for path in reversed(contents):  # the stack exits in reverse: the first is replaced first
            file = stack.enter_context(replacing(path))
            file.write(contents[path])
            file.flush()
            os.fsync(file.fileno())
        last.unlink(missing_ok=True)


def _temporary_of(path: Path) -> Path:
    # Not the tempfile module: only the owner can read its files, and a cache may be shared.
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")  # `leftovers` knows the form


@contextmanager
def put_in_place(target: Path) -> Iterator[Path]:
    """Yield a path for a file or a folder, which takes the place of `target` when the block ends without an error.

    Of a folder that is there already, files are replaced one by one, and others stay. Its config, without which the
    others are not read, is removed first and comes last. On an error nothing of the new one is left.
    """
    scratch = _temporary_of(target / "new" if target.is_dir() else target)  # on the same disk
    try:
        yield scratch
        if scratch.is_file() or not target.exists():
            scratch.replace(target)
            return
        files = [path for path in sorted(scratch.rglob("*")) if path.is_file()]
        places = {file: target / file.relative_to(scratch) for file in sorted(files, key=_is_config)}
        for file in filter(_is_config, files):
            places[file].unlink(missing_ok=True)
        for file, place in places.items():
            place.parent.mkdir(parents=True, exist_ok=True)
            file.replace(place)
        sync_folder(target)
    except OSError as error:
        if error.errno is None:
            raise type(error)(str(error).replace(str(scratch), str(target))) from error
        named = str(error.filename or target).replace(str(scratch), str(target))
        raise OSError(error.errno, error.strerror, named) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True) if scratch.is_dir() else scratch.unlink(missing_ok=True)


def _is_config(path: Path) -> bool:
    return path.stem == "config"


def write_json(path: Path, content: Any, *, indent: int | None = 2) -> None:
    """Write JSON, whole or not at all. Raises OSError."""
    with replacing(path) as file:
        file.write((json.dumps(content, indent=indent) + "\n").encode())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name `path` in errors of a block that writes to it: the system does not, once a file is open. Raises OSError."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def free_bytes(folder: Path) -> int:
    """Measure how many bytes can still be written to the disk of a folder that may not exist yet. Raises OSError."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def leftovers(folder: Path) -> Iterator[tuple[Path, str]]:
    """Find the temporary files that killed processes left in a folder, each with the name that it was to replace.

    Those of processes that still run look the same: remove them only if no other process writes these files.
    """
    for path in sorted(folder.glob(".*.tmp")):
        if found := _TEMPORARY.fullmatch(path.name):
            yield path, found[1]


def discard(path: Path) -> None:
    """Remove a file or a folder; a folder first loses its name, so that no part of it is left under that.

    Does nothing if it is not there. Raises OSError.
    """
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    nameless = path
    if not _TEMPORARY.fullmatch(path.name):
        nameless = _temporary_of(path)
        path.rename(nameless)
    shutil.rmtree(nameless, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to disk, so that a file just made, renamed or removed there stays so.

    Does nothing where the platform or the file system cannot.
    """
    if os.name == "nt":
        return
    with suppress(PermissionError):  # a folder may be written to and entered, but not read
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)


def take_lock(path: Path, *, wait: bool = False) -> FileLock | None:
    """Lock a file, which is made and stays: to remove it would let two processes lock two files of one name.

    Returns None where the file system has no locks. Raises BlockingIOError, with the holder as `strerror`.
    """
    # A soft lock, which a killed process leaves behind, is no replacement.
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    held: FileLock | None = None
    try:
        lock.acquire(timeout=-1 if wait else 0)
        held = lock
    except Timeout:
        raise BlockingIOError(errno.EAGAIN, _holder(path), str(path)) from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
    with suppress(OSError):  # a full disk will be noticed by what matters more
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    return held


def _holder(path: Path) -> str:
    """Read who holds a lock."""
    with suppress(OSError):
        return path.read_text(errors="replace").strip()[:1000] or "another process"
    return "another process"


def _say_wait(holder: str) -> None:
    print(f"waiting until {holder} has made what is needed here", file=sys.stderr)


@contextmanager
def locked(path: Path, waits: Callable[[str], None] = _say_wait) -> Iterator[bool]:
    """Hold the lock of a file; call `waits` with the holder before waiting for it, which may raise instead.

    Yields whether no other process is in the block: where the file system has no locks, nobody waits.
    """
    try:
        held = take_lock(path)
    except BlockingIOError as error:
        waits(str(error.strerror))
        held = take_lock(path, wait=True)
    try:
        yield held is not None
    finally:
        if held is not None:
            held.release()
