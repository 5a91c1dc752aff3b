"""Locks between processes that end with their process, however that ends."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: without a lock
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(path: Path, waits: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Hold the lock of a file, which is made and stays; call `waits` before waiting for another process.

    Yields whether no other process is in the block: where the platform or the file system has no locks, nobody waits.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            exclusive = lock(descriptor)
        except BlockingIOError:
            waits()
            exclusive = lock(descriptor, wait=True)
        yield exclusive
    finally:
        os.close(descriptor)


def lock(descriptor: int, *, wait: bool = False) -> bool:
    """Lock an open file, and return whether that is possible. Raises BlockingIOError if another process has it."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        return False
    return True
