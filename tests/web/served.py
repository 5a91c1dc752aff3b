"""A server of small runs, whose page is open in a browser, and what tests of it share."""

import contextlib
import json
import signal
import socket
import time
import urllib.request
from pathlib import Path

from tests.processes import Program
from tests.web.explorer import choose_greedily, open_explorer, read, wait_for

from recurra import open_run
from recurra.streams.sampling import SamplingConfig
from recurra.streams.stream import Stream

PROMPT = "the dog saw"
N_TOKENS = 24
STARTED_WITHIN = 300
"""Seconds."""


class Server:
    """`recurra serve`, which can be killed and started again at the same address."""

    def __init__(self, runs: Path, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        names = [str(runs / name) for name in ("words", "bpe", "horizon")]
        options = ["--port", str(self.port), "--sessions", str(folder / "sessions.sqlite"), "--threads", "1"]
        words = ["serve", *names, *options, "--weights", "model"]  # no kernels to compile
        self._source, self._folder = f"from recurra.cli import main\nraise SystemExit(main({words!r}))", folder
        self.address = f"http://127.0.0.1:{self.port}/"
        self._program: Program | None = None
        self.start()

    def start(self) -> None:
        """Start it, or let it go on if it is there: a test that failed may have left it held."""
        if self._program is not None:
            self.let_go()
            return
        self._program = Program(self._source, self._folder, OMP_NUM_THREADS="1")
        end = time.monotonic() + STARTED_WITHIN
        while time.monotonic() < end:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.address}health", timeout=5):
                return
            time.sleep(0.05)
        raise AssertionError(f"the server did not start\n{self._program.kill().said}")

    def kill(self) -> None:
        """End it at once, also if it is held; what has been killed stays so."""
        if self._program is not None:
            self._program, program = None, self._program
            program.kill()

    def hold(self) -> None:
        """Keep it from doing anything until `let_go`, however slow the page is meanwhile."""
        self._program.send(signal.SIGSTOP)

    def let_go(self) -> None:
        self._program.send(signal.SIGCONT)


def stream_of(runs: Path, name: str) -> Stream:
    run = open_run(runs / name)
    return Stream(run.model, run.tokenizer)


def continued(runs: Path, name: str, n_tokens: int) -> str:
    stream = stream_of(runs, name)
    stream.feed(PROMPT)
    return "".join(stream.generate_text(n_tokens, sampling=SamplingConfig(temperature=0.0)))


def write_greedily(page, server: Server) -> None:
    """Open the page and let it continue the prompt."""
    open_explorer(page, server.address)
    choose_greedily(page, N_TOKENS)
    read(page, PROMPT, then_write=True)
    wait_for(page, 3 + N_TOKENS)


def refuse(route, status: int, code: str) -> None:
    route.fulfill(status=status, json={"error": {"message": f"refused: {code}", "code": code}})


def sessions(server) -> dict[str, int]:
    """Where the server's sessions stand, by their names."""
    with urllib.request.urlopen(f"{server.address}v1/sessions?limit=1000", timeout=30) as answer:
        return {one["id"]: one["position"] for one in json.load(answer)["data"]}


def close(server, name: str) -> None:
    """Close a session, as another client may."""
    asked = urllib.request.Request(f"{server.address}v1/sessions/{name}", method="DELETE")
    with urllib.request.urlopen(asked, timeout=30):
        pass
