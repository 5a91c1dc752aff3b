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
def locked(path: Path, waits: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock of a file, which is made and stays; call `waits` before waiting for another process.

    Where the platform or the file system has no locks, nobody waits.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if not lock(descriptor):
            waits()
            lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def lock(descriptor: int, *, wait: bool = False) -> bool:
    """Lock an open file; give False if another process has it, and True also where there are no locks."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
