"""A disk that fails, or a process that is killed, at a chosen call to the system: the same at every repetition.

Calls are intercepted in this process: opening a file, writing to it, fsync, rename and unlink, below one folder.
"""

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from unittest import mock

Fault = Literal["once", "full", "killed"]
"""once: one call fails with an I/O error. full: from this call on there is no room, and only unlinking works. killed:
from this call on, nothing happens any more."""


class Killed(BaseException):
    """The process would be dead here."""


class FaultyDisk:
    """A context in which the disk below a folder fails.

    Args:
        folder: other places work as ever.
        at: the number of the call at which it fails, from 0; None: it never does, and `calls` lists what there is.
        fault: how it fails. A write that fails has written its first half.
    """

    def __init__(self, folder: Path, at: int | None = None, fault: Fault = "once") -> None:
        self.calls: list[str] = []
        self._folder, self._at, self._fault = str(folder), at, fault
        self._patches: list[Any] = []
        self._open, self._os_open = io.open, os.open

    def __enter__(self) -> "FaultyDisk":
        replaced: dict[str, Callable] = {
            "io.open": self._opened,
            "os.open": self._opened_folder,
            "os.replace": self._guard("rename", os.replace),
            "os.unlink": self._guard("unlink", os.unlink),
            "os.fsync": self._guard("fsync", os.fsync, by_path=False),
        }
        self._patches = [mock.patch(name, function) for name, function in replaced.items()]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in reversed(self._patches):
            patch.stop()

    def call(self, kind: str) -> None:
        """Count a call, and raise if it is one that fails."""
        number = len(self.calls)
        self.calls.append(kind)
        if self._at is None or number < self._at:
            return
        if self._fault == "killed":
            raise Killed
        if self._fault == "full" and kind != "unlink":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._fault == "once" and number == self._at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _guard(self, kind: str, function: Callable, *, by_path: bool = True) -> Callable:
        def guarded(*arguments: Any, **options: Any) -> Any:
            if not by_path or self._is_below(arguments[0]):
                self.call(kind)
            return function(*arguments, **options)

        return guarded

    def _is_below(self, path: Any) -> bool:
        return not isinstance(path, int) and str(path).startswith(self._folder)

    def _opened(self, file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if not self._is_below(file):
            return self._open(file, mode, *arguments, **options)
        self.call("open")
        if "b" in mode and mode[0] in "wx":
            return io.BufferedWriter(_FaultyFile(self, file, mode))
        return self._open(file, mode, *arguments, **options)

    def _opened_folder(self, path: Any, *arguments: Any, **options: Any) -> int:
        if self._is_below(path):
            self.call("open")
        return self._os_open(path, *arguments, **options)


class _FaultyFile(io.FileIO):
    def __init__(self, disk: FaultyDisk, path: Any, mode: str) -> None:
        super().__init__(path, mode.replace("b", ""))
        self._disk = disk

    def write(self, data: Any) -> int:
        try:
            self._disk.call("write")
        except (OSError, Killed):
            super().write(memoryview(data)[: len(data) // 2])
            raise
        return super().write(data) or 0
