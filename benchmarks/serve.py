"""Streams behind the server: tokens/s, times to the first token and between two; and llama.cpp's server beside.

    python -m benchmarks.serve
    python -m benchmarks.serve --only peer --peer .venv-llama/bin/python

The server runs the 88M GateLoop of `benchmarks.decoding` with random weights, kept as int8, on 2 threads; the load
generator runs beside it on the same cores, and requests arrive by a Poisson process (`benchmarks.serve_load`), on
127.0.0.1 alone and bounded in number. Each request brings 32 random tokens and writes greedily. llama.cpp's server runs
GPT-2 (124M) or Mamba (130M) in Q8_0 with as many slots as streams, and gets the same requests.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.serve_load import ask, poisson, summary
from benchmarks.table import cpu_name, keep

PROMPT, LONG_PROMPT, VOCABULARY = 32, 8192, 50257
LEVELS = {1: 300, 8: 300, 64: 400, 256: 60, 1000: 24}
"""Streams, and the tokens that each writes."""
RESULT = Path("runs/benchmarks-serve.json")


def bodies(streams: int, n_tokens: int, vocabulary: int, prompt: int = PROMPT) -> list[dict[str, Any]]:
    chance = random.Random(streams)
    return [
        {
            "model": "gateloop",
            "prompt": [chance.randrange(1, vocabulary) for _ in range(prompt)],
            "max_tokens": n_tokens,
            "temperature": 0,
            "stream": True,
        }
        for _ in range(streams)
    ]


@contextmanager
def server(command: list[str], port: int, **variables: str) -> Iterator[subprocess.Popen]:
    """Start a server, with variables of the environment, and wait until it answers."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", **variables}
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environment)
        try:
            for _ in range(6000):
                time.sleep(0.1)
                if process.poll() is not None:
                    said.seek(0)
                    raise SystemExit(f"the server ended: {said.read().decode()[-2000:]}")
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
                    break
                except OSError:
                    continue
            else:
                raise SystemExit("the server did not answer within ten minutes")
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def ours(port: int, weights: str, threads: int) -> Iterator[subprocess.Popen]:
    with tempfile.TemporaryDirectory() as folder:
        words = [str(port), weights, str(threads), str(Path(folder) / "sessions.sqlite"), "1024"]
        # as the command line sets it: workers that wait would keep the load generator from the cores
        with server([sys.executable, "-m", "benchmarks.serve_ours", *words], port, GOMP_SPINCOUNT="1000") as process:
            yield process


def streams(port: int, levels: dict[int, int], vocabulary: int) -> dict[str, Any]:
    """Load a server with more and more streams."""
    asyncio.run(poisson(port, bodies(2, 8, vocabulary), 0))  # warms up
    found = {}
    for count, n_tokens in levels.items():
        heard = asyncio.run(poisson(port, bodies(count, n_tokens, vocabulary), min(2.0, 0.03 * (count - 1))))
        found[str(count)] = summary(heard)
        print(json.dumps(found[str(count)]), flush=True)
    return found


async def long_prompt(port: int, vocabulary: int, length: int) -> dict[str, Any]:
    """64 streams write while a long prompt is read; give the times between tokens before and during that."""
    tasks = [asyncio.create_task(ask(port, "/v1/completions", body)) for body in bodies(64, 400, vocabulary)]
    await asyncio.sleep(8)
    start = time.perf_counter()
    (body,) = bodies(1, 2, vocabulary, length)
    prompt = await ask(port, "/v1/completions", body)
    end = prompt.tokens[0]
    heard = await asyncio.gather(*tasks)
    during = summary(heard, (start, end))["between ms"]
    before = summary(heard, (start - 3, start))["between ms"]
    return {
        "prompt s": end - start,
        "before ms": before,
        "during ms": during,
        "99% over the median": during[1] / during[0],
    }


@contextmanager
def peer(arguments: argparse.Namespace, architecture: str, slots: int) -> Iterator[int]:
    script = str(Path(__file__).with_name("llama_cpp_peer.py"))
    file = arguments.models / f"{architecture}-Q8_0.gguf"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([arguments.peer, script, "write", architecture, "Q8_0", str(file)], check=True)
    command = [arguments.peer, script, "http", str(file), str(arguments.threads), str(slots), str(arguments.port + 1)]
    with server(command, arguments.port + 1):
        yield arguments.port + 1


def table(found: dict[str, dict[str, Any]]) -> Table:
    made = Table("", "streams", "tokens/s", "first token, ms", "99%", "between, ms", "99%")
    for name, levels in found.items():
        for count, one in levels.items():
            times = [f"{value:,.1f}" for value in (*one["first ms"], *(one["between ms"] or (0, 0)))]
            made.add_row(name, count, f"{one['tokens/s']:,.0f}", *times)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", choices=("streams", "prompt", "peer"), help="one part (default: all but the peer)")
    add("--weights", default="int8", help="(default: int8); model prepares nothing, dry is tiny")
    add("--streams", type=int, nargs="+", default=list(LEVELS), help="(default: %(default)s)")
    add("--threads", type=int, default=2, help="(default: 2)")
    add("--port", type=int, default=8470, help="(default: %(default)s; the peer takes the next one)")
    add("--peer", default=".venv-llama/bin/python", help="Python of llama.cpp's environment (default: %(default)s)")
    add("--theirs", nargs="+", default=["gpt2"], choices=("gpt2", "mamba"), help="(default: gpt2)")
    add("--models", type=Path, default=Path("runs/llama"), help="folder of its models (default: %(default)s)")
    arguments = parser.parse_args()
    levels = {count: LEVELS.get(count, 60) for count in arguments.streams}
    vocabulary = 300 if arguments.weights == "dry" else VOCABULARY
    result: dict[str, Any] = {"cpu": cpu_name(), "weights": arguments.weights, "threads": arguments.threads}
    with ours(arguments.port, arguments.weights, arguments.threads):
        if arguments.only in (None, "streams", "peer"):
            result["streams"] = {"ours": streams(arguments.port, levels, vocabulary)}
        if arguments.only in (None, "prompt"):
            result["prompt"] = asyncio.run(long_prompt(arguments.port, vocabulary, LONG_PROMPT))
            print(result["prompt"], flush=True)
    if arguments.only == "peer":
        for architecture in arguments.theirs:
            result["streams"][f"llama.cpp, {architecture}"] = {}
            for count, n_tokens in levels.items():
                with peer(arguments, architecture, count) as port:
                    found = streams(port, {count: n_tokens}, vocabulary)
                result["streams"][f"llama.cpp, {architecture}"] |= found
    if "streams" in result:
        Console().print(table(result["streams"]))
    keep(RESULT, result)


if __name__ == "__main__":
    main()
