"""A browser, small runs to look into, and what tests of the page share."""

import functools
import http.server
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from tests.web.explorer import browsing
from tests.web.served import Server

from recurra.cli import main

CORPUS = "a cat and a dog\nthe dog saw a cat\nthe naïve cat ran — away 日本\n"
TEXT = """
experiment: text
data: {{path: {path}, batch_size: 2, segment_length: 8, {vocabulary}}}
model: {{n_layer: 1, d_model: 16, d_channel_mixing: 24, mixer_options: {{d_qk: 16, d_v: 16, n_heads: 16}}}}
optimizer: {{learning_rate: 0.02}}
schedule: {{warmup_steps: 2}}
training: {{epochs: 4, tensorboard: false, accelerator: cpu, threads: 1}}
"""
HORIZON = """
experiment: memory-horizon
data: {n_samples: 40, sequence_length: 24, batch_size: 8, resets_per_sample: 2, modulus: 7}
model: {n_layer: 1, d_model: 8, d_channel_mixing: 16, mixer_options: {d_qk: 8, d_v: 8, n_heads: 8}}
schedule: {warmup_steps: 4}
training: {epochs: 1, tensorboard: false, accelerator: cpu, threads: 1}
"""
PATIENCE = 120_000
"""Milliseconds until a page that does not do what is expected fails a test."""


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Gives a folder of some name, which is made once for all workers; no test may write there."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base

    def once(name: str, make: Callable[[Path], None]) -> Path:
        folder, done = base / name, base / f"{name}.done"
        with FileLock(base / f"{name}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return once


def _train(folder: Path) -> None:
    (folder / "corpus").mkdir()
    for split in ("train", "valid", "test"):
        (folder / "corpus" / f"{split}.txt").write_text(CORPUS * 8, encoding="utf-8")
    bpe = "vocabulary: bpe, bpe_vocab_size: 280"
    recipes = {
        "words": TEXT.format(path=folder / "corpus", vocabulary="vocabulary: words"),
        "bpe": TEXT.format(path=folder / "corpus", vocabulary=bpe),
        "horizon": HORIZON,
    }
    for name, recipe in recipes.items():
        (folder / f"{name}.yaml").write_text(recipe, encoding="utf-8")
        assert main(["train", str(folder / f"{name}.yaml"), "--run-dir", str(folder / name)]) == 0


@pytest.fixture(scope="session")
def runs(shared) -> Path:
    """A folder with three small runs: words, bpe and horizon."""
    return shared("web-runs", _train)


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    """A browser without a window. Ends with the module: while it runs, no other event loop can run in this thread."""
    with browsing() as started:
        yield started


@pytest.fixture(scope="session")
def _server(runs, tmp_path_factory) -> Iterator[Server]:
    for package in ("fastapi", "uvicorn", "sse_starlette"):
        pytest.importorskip(package, reason="needs the extra serve: pip install recurra[serve]")
    started = Server(runs, tmp_path_factory.mktemp("server"))
    yield started
    started.kill()


@pytest.fixture
def server(_server) -> Server:
    """Runs on `recurra serve`, which one test may kill and the next finds running."""
    _server.start()
    return _server


@pytest.fixture
def page(browser) -> Iterator[object]:
    """A page with nothing kept from other tests; an error inside it fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    opened.set_default_timeout(PATIENCE)
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    yield opened
    context.close()
    assert not errors


@pytest.fixture
def static_host() -> Iterator[object]:
    """Serves folders as any static host would; give it a folder, and it gives the address."""
    started: list[http.server.ThreadingHTTPServer] = []

    def host(folder: Path) -> str:
        handler = functools.partial(_Quiet, directory=str(folder))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}/"

    yield host
    for server in started:
        server.shutdown()
        server.server_close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass
