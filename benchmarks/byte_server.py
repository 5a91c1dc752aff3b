"""A server of a small model of bytes in a process of its own, for what is measured beside the model's work."""

import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from recurra._process import keep_large_blocks
from recurra.data.tokenizers import ByteEncoder
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.serve._app import run_service
from recurra.serve._http import ServeSettings
from recurra.serve._model import ServedModel


def serve_bytes(settings: ServeSettings) -> None:
    """Serve the model, with one thread, until a signal."""
    keep_large_blocks()
    run_service(_load, settings, threads=1)


def _load() -> list[ServedModel]:
    tokenizer = ByteEncoder()
    model = LanguageModel(LanguageModelConfig(len(tokenizer), None, 2, 64, 64)).eval()
    return [ServedModel("bytes", model, tokenizer, weights="float32")]


@contextmanager
def running(serve: Callable[..., None], port: int, *arguments: object) -> Iterator[int]:
    """Run `serve(port, *arguments)` in a process until the block ends; yield its number once it answers."""
    server = get_context("spawn").Process(target=serve, args=(port, *arguments))
    server.start()
    assert server.pid is not None
    try:
        while server.is_alive():
            try:
                health(port)
                break
            except OSError:
                time.sleep(0.1)
        yield server.pid
    finally:
        server.terminate()
        server.join()


def health(port: int) -> float:
    """Ask for `/health` on a new connection, and return the seconds until the answer."""
    start = time.perf_counter()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30) as answer:
        assert answer.status == 200
    return time.perf_counter() - start


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
