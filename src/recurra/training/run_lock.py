"""One process at a time trains a run: a lock that ends with its process, however that ends."""

import os
import socket
import weakref
from contextlib import suppress
from pathlib import Path

from recurra.checks import sentence
from recurra.files.locking import lock

FILE = ".lock"


class RunLock:
    """The lock of a run's folder, a file in it that says who holds it.

    The file stays when the lock is released: to remove it would let two processes lock two files of one name. Where the
    platform or the file system has no locks, all processes get the lock, and `exclusive` stays False.

    Args:
        folder: the run's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / FILE
        self.exclusive = False
        self._close: weakref.finalize | None = None
        self._identity: os.stat_result | None = None

    def acquire(self) -> None:
        """Take the lock, and make the folder if it does not exist. Does nothing if this object has it already.

        Raises:
            BlockingIOError: another process trains the run; the message names it.
            OSError: the folder cannot be written.
        """
        if self._identity is not None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        close = weakref.finalize(self, os.close, descriptor)
        try:
            self.exclusive = lock(descriptor)
        except BlockingIOError:
            holder = os.read(descriptor, 1000).decode(errors="replace").strip() or "another process"
            close()
            mend = "wait until it ends, or stop it"
            raise BlockingIOError(
                sentence("run", f"{self._folder}, which {holder} trains", "a run that nobody trains", mend)
            ) from None
        with suppress(OSError):  # a full disk will be noticed by what matters more
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._close, self._identity = close, os.fstat(descriptor)

    def release(self) -> None:
        """Give the lock back; does nothing if this object does not have it."""
        if self._close is not None:
            self._close()
        self._close = self._identity = None
        self.exclusive = False

    def require_in_place(self) -> None:
        """Raise FileNotFoundError if the folder that was locked is no longer there under its name."""
        if self._identity is None:
            return
        try:
            if os.path.samestat(os.stat(self._path), self._identity):
                return
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:
            return  # a network that does not answer just now says nothing about the folder
        came = f"{self._folder}, which was removed, moved or replaced while it was trained"
        raise FileNotFoundError(sentence("run", came, "a folder that stays until its training ends"))
