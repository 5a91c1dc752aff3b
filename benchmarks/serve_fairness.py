"""One stream of a key, alone and beside hundreds of another key's.

    python -m benchmarks.serve_fairness --others 0 500 3000

The streams of the other key read 10 bytes and write 20,000 each, one after the other; those that are refused try
again after a second. Once they write, the lone stream reads 200 bytes and writes 100, ten times. Every prompt has
other bytes, to keep the prefix cache out of it. The model has two layers and reads bytes. The server's processor time
for each token of the lone stream says how many steps it waits, whatever else the machine does.
"""

import argparse
import asyncio
import random
import resource
import statistics
import time
import urllib.request
from collections import Counter
from multiprocessing import get_context
from typing import Any

from benchmarks.byte_server import cpu_seconds, running, serve_bytes
from benchmarks.serve_load import Heard, ask
from recurra.serve._http import ServeSettings

LONE, BUSY = "the lone key", "the busy key"


def serve(port: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    serve_bytes(ServeSettings(port=port, api_keys=(LONE, BUSY)))


def body(chance: random.Random, n_bytes: int, n_tokens: int) -> dict[str, Any]:
    prompt = "".join(chance.choices("abcdefgh ", k=n_bytes))
    return {"model": "bytes", "prompt": prompt, "max_tokens": n_tokens, "logit_bias": {"0": -100}, "stream": True}


async def busy(port: int, number: int) -> None:
    chance = random.Random(number)
    while True:
        try:
            if (await ask(port, "/v1/completions", body(chance, 10, 20_000), BUSY)).status != 200:
                await asyncio.sleep(1)
        except (ConnectionError, IndexError):
            await asyncio.sleep(1)


async def lone(port: int, requests: int) -> list[Heard]:
    chance, heard = random.Random(-1), []
    for _ in range(requests):
        try:
            heard.append(await asyncio.wait_for(ask(port, "/v1/completions", body(chance, 200, 100), LONE), 60))
        except (asyncio.TimeoutError, ConnectionError, IndexError):
            heard.append(Heard(time.perf_counter()))
    return heard


def n_writing(port: int) -> float:
    """How many streams have got a first token since the server started."""
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {LONE}"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("recurra_first_token_seconds_count "))


def load(port: int, others: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)

    async def everything() -> None:
        await asyncio.gather(*(busy(port, number) for number in range(others)))

    asyncio.run(everything())


def measure(port: int, pid: int, others: int, requests: int) -> dict[str, Any]:
    loading = get_context("spawn").Process(target=load, args=(port, others))
    before = n_writing(port)
    if others:
        loading.start()
        while n_writing(port) - before < min(others, 800):
            time.sleep(1)
    start = cpu_seconds(pid)
    heard = asyncio.run(lone(port, requests))
    seconds = cpu_seconds(pid) - start
    if others:
        loading.kill()
        loading.join()
    figures = {"others": others, "statuses": dict(Counter(one.status for one in heard))}
    first = [1e3 * (one.tokens[0] - one.sent) for one in heard if one.tokens]
    if not first:
        return figures
    gaps = [1e3 * (b - a) for one in heard for a, b in zip(one.tokens, one.tokens[1:])]
    return figures | {
        "first ms": [round(statistics.median(first)), round(max(first))],
        "between ms": [round(statistics.mean(gaps), 1), round(max(gaps))],
        "processor ms per token": round(1e3 * seconds / sum(len(one.tokens) for one in heard), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--others", type=int, nargs="+", default=[0, 500, 3000], help="(default: 0 500 3000)")
    parser.add_argument("--requests", type=int, default=10, help="of the lone stream (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8767, help="(default: %(default)s)")
    arguments = parser.parse_args()
    with running(serve, arguments.port) as pid:
        for others in arguments.others:
            print(measure(arguments.port, pid, others, arguments.requests), flush=True)


if __name__ == "__main__":
    main()
