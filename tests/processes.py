"""Programs in new processes that find torch imported, which takes seconds: all are forked from one that did no more.

Recurra, Numba and Triton are as new to such a process as to a new interpreter, and its environment is its own.
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

SOURCE = Path(__file__).resolve().parents[1] / "src"

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["torch"])


class Ended(NamedTuple):
    """How a program ended: its exit status, or the signal's number below 0, and what it wrote."""

    status: int
    stdout: str
    stderr: str

    @property
    def said(self) -> str:
        """Everything, for the message of a test that fails."""
        how = f"exit status {self.status}" if self.status >= 0 else f"signal {signal.Signals(-self.status).name}"
        return f"{how}\n{self.stdout}\n{self.stderr}"


class Program:
    """A program that runs beside the test; `wait` ends it."""

    def __init__(self, source: str, folder: Path, **environment: str) -> None:
        variables = {**os.environ, "PYTHONPATH": str(SOURCE), **environment}
        self._written = [Path(tempfile.mkstemp(dir=folder)[1]) for _ in range(2)]
        given = textwrap.dedent(source), folder, variables, self._written
        self._process = _processes.Process(target=_run, args=given)
        self._process.start()

    def send(self, signal_: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self._process.pid, signal_)

    def kill(self) -> Ended:
        """End it at once, as kill -9 does."""
        self._process.kill()
        return self.wait()

    def wait(self, timeout: float = 120) -> Ended:
        """Wait for the end, and kill what takes longer than `timeout` seconds."""
        self._process.join(timeout)
        late = self._process.is_alive()
        if late:
            self._process.kill()
            self._process.join()
        ended = Ended(self._process.exitcode, *(file.read_text() for file in self._written))
        for file in self._written:
            file.unlink()
        assert not late, f"not finished after {timeout} seconds\n{ended.said}"
        return ended


def in_new_interpreter(source: str) -> str:
    """Run a program where torch is not imported yet, which `Program` does not offer, and return what it printed."""
    command = [sys.executable, "-c", textwrap.dedent(source)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def run_file(file: Path, *arguments: object) -> str:
    """Return the program that is `python FILE ARGUMENTS`."""
    return f"""
    import runpy, sys
    sys.path.insert(0, {str(file.parent)!r})
    sys.argv = {[str(file), *map(str, arguments)]!r}
    runpy.run_path({str(file)!r}, run_name="__main__")
    """


def _run(source: str, folder: Path, variables: dict[str, str], written: list[Path]) -> None:
    """Make the forked process what `python -c` would find, and run the program."""
    import torch

    for descriptor, file in zip((1, 2), written, strict=True):
        os.dup2(os.open(file, os.O_WRONLY), descriptor)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.path[:0] = variables["PYTHONPATH"].split(os.pathsep)
    sys.dont_write_bytecode = bool(variables.get("PYTHONDONTWRITEBYTECODE"))
    with contextlib.suppress(KeyError):
        torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))  # torch has read it already
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(source, "<string>", "exec"), main.__dict__)
