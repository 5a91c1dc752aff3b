"""A disk that fails, or a process that is killed, at a chosen call to the system: the same at every repetition.

Calls are intercepted in this process: opening a file, writing to it, fsync, rename and unlink, below one folder. What
libraries write without Python is not, so `SmallDisk` is a real one.
"""

import errno
import io
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

Fault = Literal["once", "full", "killed"]
"""once: one call fails with an I/O error. full: from this call on there is no room: only reading and unlinking work.
killed: from this call on, nothing happens any more."""


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
            "builtins.open": self._opened,
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

    def call(self, kind: str, path: Any = None) -> None:
        """Count a call, and raise if it is one that fails; as the system does, name the path where there is one."""
        number = len(self.calls)
        self.calls.append(kind)
        if self._at is None or number < self._at:
            return
        if self._fault == "killed":
            raise Killed
        if self._fault == "full" and kind not in ("read", "unlink"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if self._fault == "once" and number == self._at:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    def _guard(self, kind: str, function: Callable, *, by_path: bool = True) -> Callable:
        def guarded(*arguments: Any, **options: Any) -> Any:
            if not by_path or self._is_below(arguments[0]):
                self.call(kind, str(arguments[0]) if by_path else None)
            return function(*arguments, **options)

        return guarded

    def _is_below(self, path: Any) -> bool:
        return not isinstance(path, int) and str(path).startswith(self._folder)

    def _opened(self, file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if not self._is_below(file):
            return self._open(file, mode, *arguments, **options)
        is_written = mode[0] in "wxa" and "+" not in mode
        self.call("open" if is_written else "read", str(file))
        if not is_written:
            return self._open(file, mode, *arguments, **options)
        written = io.BufferedWriter(_FaultyFile(self, file, mode.replace("t", "")))
        return (
            written
            if "b" in mode
            else io.TextIOWrapper(written, options.get("encoding"), newline=options.get("newline"))
        )

    def _opened_folder(self, path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if self._is_below(path):
            self.call("open" if flags & os.O_CREAT else "read", str(path))
        return self._os_open(path, flags, *arguments, **options)


class SmallDisk:
    """A disk in memory, mounted at a folder, which only root may do. Raises PermissionError if this process may not."""

    def __init__(self, folder: Path, n_bytes: int) -> None:
        self._folder, self._n_bytes = folder, n_bytes

    def __enter__(self) -> "SmallDisk":
        words = ["mount", "-t", "tmpfs", "-o", f"size={self._n_bytes}", "tmpfs", str(self._folder)]
        if subprocess.run(words, capture_output=True, check=False).returncode:
            raise PermissionError(errno.EPERM, "mounting a disk in memory is not allowed here", str(self._folder))
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "--lazy", str(self._folder)], check=True)

    @contextmanager
    def leaving(self, n_bytes: int) -> Iterator[None]:
        """Leave this much room, in pages of 4 KiB, until the block ends."""
        filler = self._folder / ".filler"
        filler.write_bytes(bytes(max(0, shutil.disk_usage(self._folder).free - n_bytes)))
        try:
            yield
        finally:
            filler.unlink()


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
