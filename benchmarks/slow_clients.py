"""`/health` and memory while clients send half of their headers, and others large bodies all at once.

    python -m benchmarks.slow_clients
    python -m benchmarks.slow_clients --files 256

3,000 connections (which need `ulimit -n 4096`) send half of a header and wait; once they are open, 200 clients send
3.5 MB each at the same moment, half of them a text and half a list of tokens. All the while another process asks for
/health on new connections and reads the server's resident memory. A minute after the last body, it reads that once
more. The server has no API key, and a model of two layers that reads bytes; --files limits the files that it may open.
"""

import argparse
import asyncio
import json
import multiprocessing
import resource
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress

from benchmarks.byte_server import health, running, serve_bytes
from benchmarks.table import megabytes
from recurra.serve._http import ServeSettings

BODY_BYTES = 3_500_000
PROCESSES = multiprocessing.get_context("spawn")


def serve(port: int, files: int | None) -> None:
    if files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    serve_bytes(ServeSettings(port=port))


async def half_open(port: int, opened: "asyncio.Queue[None]") -> float:
    """Send half of a header, and return how long the server waited for the rest."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    start = time.monotonic()
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Half:")
    opened.put_nowait(None)
    with suppress(ConnectionResetError):
        await reader.read()
    writer.close()
    return time.monotonic() - start


async def large_body(port: int, body: bytes) -> str:
    """Send a body, and return the status."""
    lines = (
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
        writer.write("\r\n".join((*lines, "", "")).encode() + body)
        status = (await reader.readline()).split()[1].decode()
        writer.close()
    except (ConnectionError, IndexError):
        return "closed"
    return status


def load(port: int, connections: int, bodies: int) -> dict[str, object]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)

    async def everything() -> dict[str, object]:
        opened: asyncio.Queue[None] = asyncio.Queue()
        waiting = [asyncio.create_task(half_open(port, opened)) for _ in range(connections)]
        for _ in waiting:
            await opened.get()
        text = json.dumps({"prompt": "a" * BODY_BYTES}).encode()
        tokens = json.dumps({"prompt": [100 + n % 100 for n in range(BODY_BYTES // 5)]}).encode()
        statuses = Counter(await asyncio.gather(*(large_body(port, (text, tokens)[n % 2]) for n in range(bodies))))
        closed = await asyncio.gather(*waiting)
        return {"closed after s": [round(min(closed), 1), round(max(closed), 1)], "bodies": dict(statuses)}

    return asyncio.run(everything())


def measure(port: int, pid: int, connections: int, bodies: int) -> dict[str, object]:
    before = megabytes("VmRSS", pid)
    seconds, memory = [], []
    with ProcessPoolExecutor(1, mp_context=PROCESSES) as pool:
        loading = pool.submit(load, port, connections, bodies)
        while not loading.done():
            seconds.append(health(port))
            memory.append(megabytes("VmRSS", pid))
            time.sleep(0.02)
    time.sleep(60)
    return {
        **loading.result(),
        "health": len(seconds),
        "median ms": round(1e3 * sorted(seconds)[len(seconds) // 2], 1),
        "longest ms": round(1e3 * max(seconds), 1),
        "MB before, most, a minute later": [round(value) for value in (before, max(memory), megabytes("VmRSS", pid))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=3000, help="(default: %(default)s)")
    parser.add_argument("--bodies", type=int, default=200, help="(default: %(default)s)")
    parser.add_argument("--files", type=int, help="that the server may open")
    parser.add_argument("--port", type=int, default=8765, help="(default: %(default)s)")
    arguments = parser.parse_args()
    with running(serve, arguments.port, arguments.files) as pid:
        for _ in range(3):
            asyncio.run(large_body(arguments.port, b'{"model": "bytes", "prompt": "a", "max_tokens": 5}'))
        print(measure(arguments.port, pid, arguments.connections, arguments.bodies))


if __name__ == "__main__":
    main()
